"""Nodes that draft tokens say, token for token, what transformers says."""

from itertools import product
from pathlib import Path

import pytest

from kernels.operands import BlockFp8
from model.families import FamilyName
from model.tiny import write_tiny_checkpoint
from tests.dequantised import write_dequantised
from tests.e2e.asking import Job, assert_exact, random_prompts
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import FAMILIES, Reference, References, StartCluster
from tests.e2e.test_parity import ALONE, TOGETHER

# A hot buffer that cuts queries all the time: one query may fill it.
SMALL = '{"device_buffer_size": 64, "host_pool_gib": 0.2, "resident_rows": false}'


def drafting(cluster: Cluster, drafts: int, ranks: int = 1) -> None:
    flags = {"speculative_num_steps": str(drafts), "ranks": ranks}
    cluster.prefill(page_size=16, chunked_prefill_size=512, transfer_checksum="full", **flags)
    cluster.decode(hisparse_config=SMALL, debug_verify_swap_in=True, **flags)
    cluster.wait_ready(decode=ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "family"), list(product((3, 2, 1), FAMILIES)))
def test_greedy_tokens_with_drafts_equal_transformers(
    start_cluster: StartCluster, references: References, drafts: int, family: str
) -> None:
    cluster = start_cluster(family)
    drafting(cluster, drafts)
    assert_exact(cluster.url, references[family], [Job(prompt, 20) for prompt in ALONE], 1)
    assert_exact(cluster.url, references[family], [Job(prompt, 40) for prompt in TOGETHER], 16)
    more = random_prompts((300, 700), seed=9)
    assert_exact(cluster.url, references[family], [Job(prompt, 48) for prompt in more], 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_of_a_checkpoint_in_fp8_change_no_token(
    start_cluster: StartCluster,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    family: FamilyName,
) -> None:
    stored, exact = tmp_path / "fp8", tmp_path / "float32"
    write_tiny_checkpoint(stored, family, seed=7, index_topk=64, hidden_size=192, fp8=BlockFp8())
    write_dequantised(stored, exact)
    monkeypatch.setitem(checkpoints, "fp8", stored)
    cluster = start_cluster("fp8")
    drafting(cluster, 3)
    assert_exact(cluster.url, Reference(exact), [Job(prompt, 40) for prompt in TOGETHER], 16)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_that_draft_say_the_same(start_cluster: StartCluster, references: References, ranks: int) -> None:
    """Ranks with fewer requests than others, or none, take part in every pass."""
    cluster = start_cluster(FAMILIES[0])
    drafting(cluster, 2, ranks)
    for concurrency, prompts in ((1, ALONE[4:7]), (3, TOGETHER[:8]), (12, TOGETHER)):
        assert_exact(cluster.url, references[FAMILIES[0]], [Job(prompt, 40) for prompt in prompts], concurrency)
