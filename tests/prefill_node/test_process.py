"""What a prefill node refuses to start with."""

from pathlib import Path

import pytest
import torch

from base.errors import StartupError
from model.loader import read_spec
from model.tiny import write_tiny_checkpoint
from prefill_node.config import PrefillConfig
from prefill_node.process import _num_pages


def test_a_pool_holds_a_full_context_or_the_node_does_not_start(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, "glm_moe_dsa", seed=1)
    spec = read_spec(tmp_path, torch.float32, context_length=1000)

    def pages(tokens: int) -> int:
        return _num_pages(PrefillConfig(model_path=tmp_path, max_total_tokens=tokens), spec, torch.device("cpu"))

    assert pages(1024) == 16
    with pytest.raises(StartupError, match="15 pages of 64 tokens does not hold one context of 1000; raise"):
        pages(1023)
