"""The model on fp8 KV generates what transformers generates with a cache that holds the same numbers."""

from pathlib import Path

import pytest
import torch
from model_caches import Session, assert_likeliest, random_tokens
from transformers import PreTrainedModel

from base.errors import StartupError
from kvcache.format import Fp8Format
from model.loader import load_model, read_spec
from tests.fp8_reference import Fp8Cache

LENGTHS = (1, 2, 17, 64, 65, 300, 900)
NEW_TOKENS = 32


@pytest.mark.parametrize(("page_size", "chunk_size"), [(1, 100), (64, 2000)])
def test_fp8_kv_generates_the_reference_tokens(
    checkpoint: Path, reference: PreTrainedModel, page_size: int, chunk_size: int
) -> None:
    model = load_model(checkpoint, torch.float32, torch.device("cpu"), kv_cache_dtype="fp8_e4m3")
    assert isinstance(model.spec.kv_format, Fp8Format)
    session = Session(model, random_tokens(0, *LENGTHS), NEW_TOKENS, page_size)
    assert_likeliest(reference, session, NEW_TOKENS, chunk_size, lambda: Fp8Cache(config=reference.config))


def test_fp8_kv_is_not_the_same_as_float32(checkpoint: Path, reference: PreTrainedModel) -> None:
    """The test above would see it if nothing was rounded."""
    prompt = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(1))
    exact, rounded = (
        Session(load_model(checkpoint, torch.float32, torch.device("cpu"), kv_cache_dtype=name), [prompt], 1).prefill(
            64
        )
        for name in ("auto", "fp8_e4m3")
    )
    assert (exact - rounded).abs().max() > 1e-2


def test_bfloat16_kv_under_float32(checkpoint: Path) -> None:
    prompt = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(1))
    model = load_model(checkpoint, torch.float32, torch.device("cpu"), kv_cache_dtype="bfloat16")
    assert model.spec.kv_format.name == "bfloat16"
    assert Session(model, [prompt], 1).prefill(64).isfinite().all()


def test_widths_that_fp8_does_not_take_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = (checkpoint / "config.json").read_text()
    assert '"index_head_dim": 32' in config
    (tmp_path / "config.json").write_text(config.replace('"index_head_dim": 32', '"index_head_dim": 24'))
    with pytest.raises(StartupError, match=r"--kv-cache-dtype fp8_e4m3: it takes .* power of two, not 48, 16 and 24"):
        read_spec(tmp_path, torch.float32, load_format="dummy", kv_cache_dtype="fp8_e4m3")
