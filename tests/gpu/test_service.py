"""The service with its nodes on a CUDA device: the end-to-end tests that leave the device open, and mixed pairs."""

import subprocess

import pytest
import torch

from tests.e2e.cluster import HOT_BUFFER
from tests.e2e.conftest import (
    FAMILIES,
    Reference,
    StartCluster,
    StartPair,
    checkpoints,
    references,
    start_cluster,
    start_pair,
)
from tests.e2e.test_aborts import test_aborts_among_exact_answers
from tests.e2e.test_parity import ALONE, TOGETHER, assert_exact, test_greedy_tokens_equal_transformers
from tests.e2e.test_paths import (
    test_local_prefill_says_the_same,
    test_requests_that_were_retracted_say_the_same,
)
from tests.e2e.test_prefixes import test_cached_prefixes_give_the_same_tokens

__all__ = [
    "checkpoints",
    "references",
    "start_cluster",
    "start_pair",
    "test_aborts_among_exact_answers",
    "test_cached_prefixes_give_the_same_tokens",
    "test_greedy_tokens_equal_transformers",
    "test_local_prefill_says_the_same",
    "test_requests_that_were_retracted_say_the_same",
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
    start_pair: StartPair, references: dict[str, Reference], family: str, disable_cuda_graph: bool
) -> None:
    """A check waits for the device, and could hide that something else does not."""
    flags = {"transfer_protocol": "auto", "disable_cuda_graph": disable_cuda_graph}
    cluster, prefill, decode = start_pair(family=family, **flags)
    assert_exact(cluster, references[family], ALONE, concurrency=1)
    assert_exact(cluster, references[family], TOGETHER, concurrency=16)

    assert ("recorded a decode step" in decode.log) is not disable_cuda_graph
    for node in (prefill, decode):
        assert "device memory: " in node.log, "the split is said at start"
    assert decode.metric("swap_in_misses_total") > 0
    assert decode.metric("host_slots", state="used") == 0


@pytest.mark.parametrize(("family", "protocol"), [(FAMILIES[0], "tcp"), (FAMILIES[1], "auto")])
def test_prompts_computed_on_the_gpu_are_decoded_exactly_on_the_cpu(
    start_pair: StartPair, references: dict[str, Reference], family: str, protocol: str
) -> None:
    flags = {"page_size": 64, "chunked_prefill_size": 333, "transfer_checksum": "full"}
    cluster, prefill, _ = start_pair(
        {**flags, "transfer_protocol": protocol},
        family,
        device="cpu",
        debug_verify_swap_in=True,
        transfer_protocol="auto",
    )
    assert_exact(cluster, references[family], TOGETHER, concurrency=16)

    assert prefill.metric("transfer_bytes_total") > 0
    assert f"transport={'tcp' if protocol == 'tcp' else 'shm'} gathers=always" in prefill.log


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("protocol", ["auto", "tcp"])
def test_a_process_per_gpu_of_one_host_says_the_same(
    start_cluster: StartCluster, references: dict[str, Reference], protocol: str, disable_cuda_graph: bool
) -> None:
    """Every thread and kernel of a process must mean its own device, and no other's."""
    family = FAMILIES[0]
    cluster = start_cluster(family)
    nodes = [cluster.prefill(device="cuda:1", transfer_protocol=protocol)]
    nodes += [
        cluster.decode(
            f"decode-{number}",
            device=f"cuda:{number}",
            hisparse_config=HOT_BUFFER,
            transfer_protocol=protocol,
            disable_cuda_graph=disable_cuda_graph,
        )
        for number in (0, 1)
    ]
    cluster.wait_ready()

    assert_exact(cluster, references[family], TOGETHER, concurrency=16)

    for decode in nodes[1:]:
        assert decode.metric("generated_tokens_total") > 0
        assert decode.metric("swap_in_misses_total") > 0
        assert decode.metric("host_slots", state="used") == 0
    assert devices_used_by(nodes[1].process.pid) == {0}
    assert devices_used_by(nodes[2].process.pid) == {1}


def devices_used_by(pid: int) -> set[int]:
    """The GPUs on which a process has memory, by the driver's account."""
    lines = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    uuids = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    used = [line.split(", ")[1].removeprefix("GPU-") for line in lines if int(line.split(", ")[0]) == pid]
    return {uuids.index(uuid) for uuid in used}
