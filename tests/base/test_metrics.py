"""What every process exports from its start."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from base.histogram import FastHistogram
from base.metrics import TRANSFER_FAILURES, Metrics


def test_counters_that_alerts_watch_start_at_zero() -> None:
    """To Prometheus a series that begins with 1 has not increased: the first failure would go unnoticed."""
    text = Metrics().render().decode()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for reason in TRANSFER_FAILURES:
        assert samples["hisparse_pd_transfer_failures_total", reason] == 0
    assert samples["hisparse_pd_retractions_total", "host"] == 0
    assert samples["hisparse_pd_requests_finished_total", "queue_full"] == 0
    assert samples["hisparse_pd_swap_in_violations_total",] == 0


@given(st.lists(st.sampled_from([0.0, 0.001, 0.0011, 0.25, 1, 1.5, 1e9]), max_size=20))
def test_the_fast_histogram_exports_what_the_library_does(values: list[float]) -> None:
    exported = []
    for kind in (FastHistogram, Histogram):
        registry = CollectorRegistry()
        histogram = kind("h", "What it says.", buckets=(0.001, 0.25, 1), registry=registry)
        for value in values:
            histogram.observe(value)
        exported.append(generate_latest(registry))
    assert exported[0] == exported[1]
