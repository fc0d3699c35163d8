"""What real nodes tell the gateway of themselves is what their metrics say."""

from typing import Any

from tests.e2e.asking import Job, complete, random_prompts
from tests.e2e.cluster import HOT_BUFFER, wait_until
from tests.e2e.conftest import StartCluster

JOBS = [Job(prompt, 24) for prompt in random_prompts((600, 400), seed=9)]


def test_the_cluster_report_has_the_totals_of_the_nodes(start_cluster: StartCluster) -> None:
    cluster = start_cluster(status_page=True)
    prefill, decode = cluster.prefill(), cluster.decode(hisparse_config=HOT_BUFFER)
    cluster.wait_ready()
    gateway = cluster.nodes["gateway"]

    def reported(role: str) -> dict[str, Any]:
        [node] = [node for node in gateway.get("/v1/cluster").json()["nodes"] if node["role"] == role]
        return node

    wait_until(lambda: reported("decode")["history"]["kv_usage"] and reported("prefill")["history"]["kv_usage"])
    complete(cluster.url, JOBS)
    misses = decode.metric("swap_in_misses_total")
    assert misses > 0
    wait_until(lambda: reported("decode")["misses"] == misses, what="a sample after the last step")
    assert reported("decode")["hits"] == decode.metric("swap_in_hits_total")
    swapped, sent = (
        sum(rate or 0 for rate in reported(role)["history"][rates]) * 5.0
        for role, rates in (("decode", "swapped_bytes_per_s"), ("prefill", "transferred_bytes_per_s"))
    )
    assert swapped > 0.9 * decode.metric("swap_in_bytes_total")
    assert sent > 0.9 * prefill.metric("transfer_bytes_total")
