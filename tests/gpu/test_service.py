"""A prefill node on a CUDA device writes straight into the host memory of a decode node."""

import json
from collections.abc import Callable

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import FAMILIES, Reference, checkpoints, references, start_cluster
from tests.e2e.test_parity import TOGETHER, assert_exact

__all__ = ["checkpoints", "references", "start_cluster"]


@pytest.mark.parametrize(("family", "protocol"), [(FAMILIES[0], "tcp"), (FAMILIES[1], "auto")])
def test_prompts_computed_on_the_gpu_are_decoded_exactly(
    start_cluster: Callable[..., Cluster],
    references: dict[str, Reference],
    family: str,
    protocol: str,
) -> None:
    cluster = start_cluster(family)
    prefill = cluster.prefill(
        device="cuda",
        page_size=64,
        chunked_prefill_size=333,
        transfer_protocol=protocol,
        transfer_checksum="full",
    )
    cluster.decode(
        hisparse_config=json.dumps({"device_buffer_size": 128}), debug_verify_swap_in=True, transfer_protocol="auto"
    )
    cluster.wait_ready()

    assert_exact(cluster, references[family], TOGETHER, concurrency=16)

    assert prefill.metric("transfer_bytes_total") > 0
    assert f"transport={'tcp' if protocol == 'tcp' else 'shm'} gathers=always" in prefill.log
