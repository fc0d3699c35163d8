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
