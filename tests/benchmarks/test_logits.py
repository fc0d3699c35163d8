"""The plain computation is the network's by other means, and distances are taken of the same texts."""

from pathlib import Path

import pytest
import torch

from benchmarks.logits.checkpoint import PublishedShape, random_checkpoint
from benchmarks.logits.forced import forced_logits
from benchmarks.logits.plain import EXACT, PlainNetwork
from model.loader import load_model

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 192,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "vocab_size": 320,
    "n_routed_experts": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "index_n_heads": 16,
    "index_topk": 64,
}


@pytest.mark.parametrize("shape", ["deepseek-v3.2", "glm-5.2"])
@pytest.mark.parametrize("tokens", [60, 300])
def test_in_float32_the_plain_network_is_the_served_one(shape: PublishedShape, tokens: int, tmp_path: Path) -> None:
    """Whether all positions are selected or not."""
    checkpoint = random_checkpoint(shape, CPU, SIZES)
    checkpoint.write(tmp_path / "model")
    text = torch.randint(0, 320, (tokens,), generator=torch.Generator().manual_seed(1))
    expected = PlainNetwork(checkpoint.tensors, checkpoint.config, EXACT).logits(text, 30)
    served = forced_logits(load_model(tmp_path / "model", torch.float32, CPU), text, (16, 8, 5, 1), chunk=100)
    torch.testing.assert_close(served, expected, rtol=1e-4, atol=1e-4)
