"""The model path on a CUDA device, against transformers on the same device."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.paged_pool import PagedKVPool, PagedSequence
from model.loader import load_model
from model.passes import PrefillChunk
from model.tiny import write_tiny_checkpoint

CUDA = torch.device("cuda")
NEW_TOKENS = 32


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 500, 1200])
def test_prefill_in_chunks_then_decode_equals_generate(family: str, length: int, tmp_path: Path) -> None:
    """Decoding recomputes nothing: each new token is a chunk of one against the paged pool."""
    write_tiny_checkpoint(tmp_path / "tiny", family, seed=7)
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32).eval().to(CUDA)
    prompt = torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(length)).to(CUDA)
    expected = network.generate(
        prompt[None],
        attention_mask=torch.ones_like(prompt[None]),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
    )[0, length:].tolist()

    model = load_model(tmp_path / "tiny", torch.float32, CUDA)
    pool = PagedKVPool(model.spec.kv_layout, num_pages=100, page_size=16, device=CUDA)
    pages = pool.allocate(length + NEW_TOKENS)
    assert pages is not None
    cache = PagedSequence(pool, pages)
    for start in range(0, length, 200):
        logits = model.prefill([PrefillChunk(prompt[start : start + 200], start, length, cache)])
    tokens = [int(logits.argmax())]
    while len(tokens) < NEW_TOKENS:
        start = length + len(tokens) - 1
        newest = torch.tensor(tokens[-1:], device=CUDA)
        logits = model.prefill([PrefillChunk(newest, start, start + 1, cache)])
        tokens.append(int(logits.argmax()))
    assert tokens == expected
