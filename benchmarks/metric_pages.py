"""What processes say of themselves at /metrics."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

Metrics = dict[str, float]
"""Values of metrics without labels, by name without prefix."""


def read_metrics(*base_urls: str) -> Metrics:
    """Of all these processes, added up. Raises httpx.HTTPError for one that does not answer."""
    values: Metrics = {}
    for base_url in base_urls:
        text = httpx.get(f"{base_url}/metrics", timeout=10, trust_env=False).raise_for_status().text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        for sample in samples:
            if not sample.labels:
                name = sample.name.removeprefix("hisparse_pd_")
                values[name] = values.get(name, 0.0) + sample.value
    return values
