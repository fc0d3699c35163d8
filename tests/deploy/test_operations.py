"""docs/operations.md says what the code and the alert rules say."""

import re

import yaml

from deploy.monitoring.generate import HERE
from tests.docs.sizing import OPERATIONS, Example, with_example

TEXT = OPERATIONS.read_text()
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


def test_the_worked_example_is_what_the_sizing_functions_say() -> None:
    """`python -m tests.docs.sizing` rewrites it."""
    assert with_example(TEXT) == TEXT


def test_the_worked_example_can_be_served() -> None:
    example = Example()
    sizes = example.sizes(example.running, example.pool_gib)
    assert sizes.num_device_slots == sizes.asked_device_slots, "every request has a full hot buffer"
    assert sizes.num_host_slots >= example.running * example.context, "and host memory for its whole context"
    assert example.gpus * sizes.host_bytes <= (example.host_gib - example.reserved_gib) * 2**30


def test_the_formulas_give_what_the_example_says() -> None:
    """As they stand in the table above the example, for its numbers."""
    example = Example()
    sizes = example.sizes(example.running, example.pool_gib)
    n, c, h, page = example.running, example.context, example.buffer_size, example.page_size
    layers, index_layers, item, key = 61, 61, (512 + 64) * 2, 128 * 2
    s, g = 4112, 16
    assert sizes.layout.token_bytes == layers * item + index_layers * key
    assert sizes.hot_bytes == n * s * layers * item
    assert sizes.index_bytes == n * c * index_layers * key
    assert sizes.table_bytes == n * (8 * (s // g + c // page + c) + index_layers * (2 * c + 5 * h + 4))
    for formula in (
        "`token = L x item + X x key`",
        "`N x S x L x item`",
        "`N x C x X x key`",
        "`N x (8 x (S / g + C / page + C) + X x (2 x C + 5 x H + 4))`",
    ):
        assert formula in TEXT


def test_every_alert_has_a_row_and_every_row_an_alert() -> None:
    rows = re.findall(r'^\| <a id="([a-z]+)"></a>`(\w+)` \| [^|]+ \| [^|]+ \|$', TEXT, flags=re.MULTILINE)
    assert [alert for _, alert in rows] == list(ALERTS)
    for anchor, alert in rows:
        assert ALERTS[alert]["annotations"]["runbook_url"] == f"docs/operations.md#{anchor}"


def test_links_within_the_page_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", TEXT, flags=re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    anchors |= set(re.findall(r'<a id="(\w+)">', TEXT))
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= anchors
