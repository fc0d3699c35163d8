"""What a prefill node refuses to start with."""

from pathlib import Path

import pytest
import torch

from base.errors import StartupError
from model.config import ModelSpec
from model.loader import read_spec
from model.tiny import write_tiny_checkpoint
from prefill_node import process
from prefill_node.config import PrefillConfig
from prefill_node.process import _num_pages
from ranks.group import SingleRank
from tests.decode_node.test_process import AlikeRanks


def spec_in(directory: Path) -> ModelSpec:
    write_tiny_checkpoint(directory, "glm_moe_dsa", seed=1)
    return read_spec(directory, torch.float32, context_length=1000)


def test_a_pool_holds_a_full_context_or_the_node_does_not_start(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)

    def pages(tokens: int) -> int:
        config, cpu = PrefillConfig(model_path=tmp_path, max_total_tokens=tokens), torch.device("cpu")
        return _num_pages(config, spec, cpu, SingleRank(cpu))

    assert pages(1024) == 16
    with pytest.raises(StartupError, match="15 pages of 64 tokens does not hold one context of 1000; raise"):
        pages(1023)


def test_ranks_on_cpus_divide_the_memory_of_their_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_in(tmp_path)
    monkeypatch.setattr(process, "pool_bytes", lambda device, fraction: 4000 * spec.kv_layout.token_bytes)

    def pages(ranks: int, kind: str = "cpu") -> int:
        group = SingleRank(torch.device(kind)) if ranks == 1 else AlikeRanks(ranks)
        return _num_pages(PrefillConfig(model_path=tmp_path), spec, torch.device(kind), group)

    assert (pages(1), pages(2)) == (62, 31)
    with pytest.raises(StartupError, match="does not hold one context of 1000"):
        pages(5)


def test_all_ranks_have_as_many_pages_as_the_one_with_the_least_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_in(tmp_path)
    monkeypatch.setattr(process, "pool_bytes", lambda device, fraction: 8000 * spec.kv_layout.token_bytes)
    group = AlikeRanks(2)
    monkeypatch.setattr(group, "share", lambda value: [value, value and 2000])
    assert _num_pages(PrefillConfig(model_path=tmp_path), spec, torch.device("cpu"), group) == 31
