"""What a prefill node refuses to start with."""

from pathlib import Path
from typing import Any

import pytest
import torch

from base.errors import StartupError
from model.loader import read_spec
from model.tiny import write_tiny_checkpoint
from prefill_node import process
from prefill_node.config import PrefillConfig
from prefill_node.process import _num_pages
from ranks.group import Ranks, SingleRank
from tests.decode_node.test_process import AlikeRanks

CPU = torch.device("cpu")


class Sizing:
    """A node with a tiny checkpoint of 1000 positions."""

    def __init__(self, directory: Path) -> None:
        write_tiny_checkpoint(directory, "glm_moe_dsa", seed=1)
        self.directory, self.spec = directory, read_spec(directory, torch.float32, context_length=1000)

    def pages(self, group: Ranks | None = None, **options: Any) -> int:
        return _num_pages(PrefillConfig(model_path=self.directory, **options), self.spec, CPU, group or SingleRank(CPU))


@pytest.fixture
def node(tmp_path: Path) -> Sizing:
    return Sizing(tmp_path)


def test_a_pool_holds_a_full_context_or_the_node_does_not_start(node: Sizing) -> None:
    assert node.pages(max_total_tokens=1024) == 16
    with pytest.raises(StartupError, match="15 pages of 64 tokens does not hold one context of 1000; raise"):
        node.pages(max_total_tokens=1023)


def test_ranks_on_cpus_divide_the_memory_of_their_host(node: Sizing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "pool_bytes", lambda device, fraction: 4000 * node.spec.kv_layout.token_bytes)
    assert (node.pages(), node.pages(AlikeRanks(2))) == (62, 31)
    with pytest.raises(StartupError, match="does not hold one context of 1000"):
        node.pages(AlikeRanks(5))


def test_all_ranks_have_as_many_pages_as_the_one_with_the_least_memory(
    node: Sizing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "pool_bytes", lambda device, fraction: 8000 * node.spec.kv_layout.token_bytes)
    group = AlikeRanks(2)
    monkeypatch.setattr(group, "share", lambda value: [value, value and 2000])
    assert node.pages(group) == 31
