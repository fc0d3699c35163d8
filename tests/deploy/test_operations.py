"""The pages of docs/operations say what the code and the alert rules say."""

import re

import yaml

from deploy.monitoring.generate import HERE
from tests.docs.sizing import INSTALL, Example, with_example
from tests.test_house import ROOT

TROUBLESHOOT = (ROOT / "docs/operations/troubleshoot.md").read_text()
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}


def test_the_worked_example_is_what_the_sizing_functions_say() -> None:
    """`python -m tests.docs.sizing` rewrites it."""
    text = INSTALL.read_text()
    assert with_example(text) == text


def test_the_worked_example_can_be_served() -> None:
    example = Example()
    sizes = example.sizes(example.running, example.pool_gib)
    assert sizes.num_device_slots == sizes.asked_device_slots, "every request has a full hot buffer"
    assert sizes.num_host_slots >= example.running * example.context, "and host memory for its whole context"
    assert example.gpus * sizes.host_bytes <= (example.host_gib - example.reserved_gib) * 2**30


def test_every_alert_has_a_row_and_every_row_an_alert() -> None:
    rows = re.findall(r'^\| <a id="([a-z]+)"></a>`(\w+)` \| [^|]+ \| [^|]+ \|$', TROUBLESHOOT, flags=re.MULTILINE)
    assert [alert for _, alert in rows] == list(ALERTS)
    for anchor, alert in rows:
        assert ALERTS[alert]["annotations"]["runbook_url"] == f"docs/operations/troubleshoot.md#{anchor}"
