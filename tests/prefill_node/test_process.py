"""What a prefill node refuses to start with."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from base.errors import StartupError
from model.loader import read_spec
from model.stored_weights import StoredWeights
from model.tiny import write_tiny_checkpoint
from prefill_node import pool
from prefill_node.config import PrefillConfig
from prefill_node.pool import fit_pages
from prefill_node.process import run_prefill_node
from ranks.group import Ranks, SingleRank
from tests.decode_node.test_process import AlikeRanks

CPU = torch.device("cpu")


class Sizing:
    """A node with a tiny checkpoint of 1000 positions."""

    def __init__(self, directory: Path) -> None:
        write_tiny_checkpoint(directory, "glm_moe_dsa", seed=1)
        self.directory, self.spec = directory, read_spec(directory, torch.float32, context_length=1000)

    def pages(self, group: Ranks | None = None, context_length: int | None = 1000, **options: Any) -> int:
        config = PrefillConfig(model_path=self.directory, context_length=context_length, **options)
        return fit_pages(config, self.spec, group or SingleRank(CPU))[1]


@pytest.fixture
def node(tmp_path: Path) -> Sizing:
    return Sizing(tmp_path)


def test_a_pool_holds_a_full_context_or_the_node_does_not_start(node: Sizing) -> None:
    assert node.pages(max_total_tokens=1024) == 16
    with pytest.raises(StartupError, match="15 pages of 64 tokens does not hold one context of 1000; raise"):
        node.pages(max_total_tokens=1023)


def test_ranks_on_cpus_divide_the_memory_of_their_host(node: Sizing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "pool_bytes", lambda device, fraction, to_load: 4000 * node.spec.kv_layout.token_bytes)
    assert (node.pages(), node.pages(AlikeRanks(2))) == (62, 31)
    with pytest.raises(StartupError, match="does not hold one context of 1000"):
        node.pages(AlikeRanks(5))


def test_all_ranks_have_as_many_pages_as_the_one_with_the_least_memory(
    node: Sizing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "pool_bytes", lambda device, fraction, to_load: 8000 * node.spec.kv_layout.token_bytes)
    group = AlikeRanks(2)
    monkeypatch.setattr(group, "share", lambda value: [value, value and 2000])
    assert node.pages(group) == 31


def test_the_context_is_what_fits_unless_it_is_asked_for(node: Sizing, monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = node.spec.kv_layout.token_bytes
    monkeypatch.setattr(pool, "pool_bytes", lambda device, fraction, to_load: (700 - to_load) * token_bytes)
    weights = 100
    for context_length, fits in ((None, 576), (576, 576), (577, None)):
        config = PrefillConfig(model_path=node.directory, context_length=context_length)
        spec = replace(node.spec, context_length=context_length or 1000)
        if fits is None:
            with pytest.raises(StartupError, match="9 pages of 64 tokens does not hold one context of 577"):
                fit_pages(config, spec, SingleRank(CPU), weights)
        else:
            fitting, pages = fit_pages(config, spec, SingleRank(CPU), weights)
            assert (fitting.context_length, pages) == (fits, 9)


def test_what_does_not_fit_is_found_before_weights_are_read(
    node: Sizing, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def read(*_: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(StoredWeights, "fill", read)
    monkeypatch.setattr(pool, "pool_bytes", lambda device, fraction, to_load: 0)
    config = PrefillConfig(model_path=node.directory, port=0, control_port=0, transfer_protocol="shm")
    with pytest.raises(StartupError, match="a KV pool of 0 pages of 64 tokens does not hold one context"):
        run_prefill_node(config)
