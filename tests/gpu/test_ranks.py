"""Ranks on GPUs of their own, connected by NCCL, inside recorded steps."""

import signal
from pathlib import Path

import pytest
import torch

from kernels.operands import BlockFp8
from model.tiny import write_tiny_checkpoint
from tests.e2e.cluster import HOT_BUFFER, wait_until
from tests.e2e.conftest import FAMILIES, Reference, StartCluster, checkpoints, references, start_cluster
from tests.e2e.test_group_fetch import assert_fetched_in_parts
from tests.e2e.test_prefill_ranks import CHUNK, assert_rounds
from tests.e2e.test_ranks import ROUNDS, assert_ranks_exact
from tests.gpu.ranks_program import run_ranks

__all__ = ["checkpoints", "references", "start_cluster"]


def group_of(ranks: int) -> object:
    """A parameter: this many ranks, on a GPU each."""
    lacking = pytest.mark.skipif(torch.cuda.device_count() < ranks, reason=f"needs {ranks} GPUs")
    return pytest.param(ranks, marks=lacking)


GROUPS = [group_of(2), group_of(4)]


@pytest.fixture
def device() -> str:
    return "cuda"


@pytest.mark.parametrize("ranks", GROUPS)
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "fp8"])
def test_layers_whose_experts_are_divided_compute_what_whole_ones_do(tmp_path: Path, stored: str, ranks: int) -> None:
    path = tmp_path / "tiny"
    write_tiny_checkpoint(path, "deepseek_v32", seed=3, hidden_size=256, fp8=BlockFp8() if stored == "fp8" else None)
    run_ranks(ranks, path, "float32" if stored == "float32" else "bfloat16")


@pytest.mark.parametrize("ranks", GROUPS)
@pytest.mark.parametrize("disable_cuda_graph", [False, True], ids=["recorded", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_of_all_ranks_equal_transformers(
    start_cluster: StartCluster, references: dict[str, Reference], family: str, disable_cuda_graph: bool, ranks: int
) -> None:
    cluster = start_cluster(family)
    cluster.prefill(device="cuda:1", mem_fraction_static=0.1)
    decode = cluster.decode(
        device="cuda",
        ranks=ranks,
        hisparse_config=HOT_BUFFER,
        mem_fraction_static=0.1,
        disable_cuda_graph=disable_cuda_graph,
    )
    assert_ranks_exact(cluster, decode, references[family], ranks, ROUNDS)
    assert ("recorded a decode step" in decode.log) is not disable_cuda_graph
    assert "backend=nccl" in decode.log


@pytest.mark.parametrize("ranks", GROUPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_behind_a_group_that_prefills_equal_transformers(
    start_cluster: StartCluster, references: dict[str, Reference], family: str, ranks: int
) -> None:
    cluster = start_cluster(family)
    flags = {"device": "cuda", "mem_fraction_static": 0.1}
    prefill = cluster.prefill(ranks=ranks, chunked_prefill_size=CHUNK, transfer_checksum="full", **flags)
    cluster.decode(hisparse_config=HOT_BUFFER, **flags)
    cluster.wait_ready(decode=1, prefill=1)
    assert_rounds(cluster.url, references[family])
    wait_until(lambda: not prefill.metric("prefill_pages", state="used"))
    prefill.signal(signal.SIGTERM)
    assert prefill.process.wait(timeout=60) == 0
    assert "backend=nccl" in prefill.log


@pytest.mark.parametrize("ranks", GROUPS)
def test_prefill_ranks_fetch_prefixes_into_all_devices(
    start_cluster: StartCluster, references: dict[str, Reference], ranks: int
) -> None:
    flags = {"device": "cuda", "mem_fraction_static": 0.1}
    assert_fetched_in_parts(start_cluster(), references["deepseek_v32"], ranks, **flags)
