"""Ranks of a node, decode or prefill, that are of other versions or checkpoints refuse each other by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import decode_node.process
import prefill_node.process
from base.errors import StartupError
from base.version import VERSION
from decode_node.config import DecodeConfig
from model.config import ModelSpec
from prefill_node.config import PrefillConfig
from ranks.group import RankGroup
from service.node_model import common_to_ranks
from tests.decode_node.test_process import SPEC


class Two(RankGroup):
    """A group whose rank 1 says what this rank 0 does, but for some values."""

    rank = 0
    device = torch.device("cpu")

    def __init__(self, **other: object) -> None:
        self._other = other

    def share(self, value: Any) -> list[Any]:
        assert value.keys() >= self._other.keys()
        return [value, {**value, **self._other}]


Check = Callable[[RankGroup, ModelSpec], None]


def decode(ranks: RankGroup, spec: ModelSpec) -> None:
    config = DecodeConfig(model_path=Path(), ranks=2)
    ranks.check_same_config({**common_to_ranks(ranks, config, spec), **decode_node.process.common_to_ranks(config)})


def prefill(ranks: RankGroup, spec: ModelSpec) -> None:
    config = PrefillConfig(model_path=Path(), ranks=2)
    ranks.check_same_config({**common_to_ranks(ranks, config, spec), **prefill_node.process.common_to_ranks(config)})


@pytest.mark.parametrize("check", [decode, prefill])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("version", f"{VERSION} (protocol 1)"),
        ("fingerprint", "g"),
        ("kv_format", "fp8_e4m3"),
        ("ranks", 4),
        ("computes_in_fp8", True),
    ],
)
def test_a_rank_with_another_value_is_refused_with_both(check: Check, name: str, theirs: object) -> None:
    check(Two(), SPEC)
    with pytest.raises(StartupError, match=rf"^rank 1 has {name} .*, rank 0 has .*: all ranks of a group") as refused:
        check(Two(**{name: theirs}), SPEC)
    assert f"rank 1 has {name} {theirs}, " in str(refused.value)
