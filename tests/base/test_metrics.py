"""What every process exports from its start."""

from prometheus_client.parser import text_string_to_metric_families

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
