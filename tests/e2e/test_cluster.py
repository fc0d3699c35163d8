"""What tests read from a process is what it says, and never a zero for want of it."""

import pytest

from base.metrics import Metrics
from tests.e2e.cluster import metric_value


def test_a_metric_that_does_not_exist_is_no_zero() -> None:
    metrics = Metrics()
    metrics.host_slots.labels("used").set(3)
    metrics.prompt_tokens.inc(2)
    metrics.ttft.observe(0.5)
    text = metrics.render().decode()
    assert metric_value(text, "hisparse_pd_host_slots", {"state": "used"}) == 3
    assert metric_value(text, "hisparse_pd_host_slots", {"state": "free"}) == 0, "not seen yet"
    assert metric_value(text, "hisparse_pd_device_slots", {"state": "free"}) == 0, "no label seen yet"
    assert metric_value(text, "hisparse_pd_prompt_tokens_total", {}) == 2
    assert metric_value(text, "hisparse_pd_ttft_seconds_count", {}) == 1
    for name, labels in (("host_slot", {}), ("prompt_tokens", {}), ("host_slots", {"kind": "used"})):
        with pytest.raises(LookupError, match=name):
            metric_value(text, f"hisparse_pd_{name}", labels)
