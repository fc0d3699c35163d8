"""The service with its nodes on a CUDA device: the end-to-end tests that leave the device open, and mixed pairs."""

import json
from collections.abc import Callable

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import FAMILIES, Reference, checkpoints, references, start_cluster
from tests.e2e.test_aborts import test_two_hundred_requests_a_third_of_them_aborted
from tests.e2e.test_parity import ALONE, HOT_BUFFER, TOGETHER, assert_exact, test_greedy_tokens_equal_transformers
from tests.e2e.test_paths import (
    test_a_node_that_prefills_for_itself_says_the_same,
    test_requests_that_were_retracted_say_the_same,
)

__all__ = [
    "checkpoints",
    "references",
    "start_cluster",
    "test_a_node_that_prefills_for_itself_says_the_same",
    "test_greedy_tokens_equal_transformers",
    "test_requests_that_were_retracted_say_the_same",
    "test_two_hundred_requests_a_third_of_them_aborted",
]


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.fixture(params=[False, True], ids=["recorded", "eager"])
def disable_cuda_graph(request: pytest.FixtureRequest) -> bool:
    disabled: bool = request.param
    return disabled


@pytest.mark.parametrize("family", FAMILIES)
def test_nodes_that_verify_nothing_say_the_same(
    start_cluster: Callable[..., Cluster], references: dict[str, Reference], family: str, disable_cuda_graph: bool
) -> None:
    """A check waits for the device, and could hide that something else does not."""
    cluster = start_cluster(family)
    cluster.prefill(device="cuda")
    decode = cluster.decode(
        device="cuda", hisparse_config=HOT_BUFFER, transfer_protocol="auto", disable_cuda_graph=disable_cuda_graph
    )
    cluster.wait_ready()

    assert_exact(cluster, references[family], ALONE, concurrency=1)
    assert_exact(cluster, references[family], TOGETHER, concurrency=16)

    assert ("recorded a decode step" in decode.log) is not disable_cuda_graph
    assert decode.metric("swap_in_misses_total") > 0
    assert decode.metric("host_slots", state="used") == 0


@pytest.mark.parametrize(("family", "protocol"), [(FAMILIES[0], "tcp"), (FAMILIES[1], "auto")])
def test_prompts_computed_on_the_gpu_are_decoded_exactly_on_the_cpu(
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
