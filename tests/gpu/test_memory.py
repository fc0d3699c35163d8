"""What memory a CUDA device takes: a prompt no more than its length asks for, and a host pool that lies near it."""

import os
from pathlib import Path

import pytest
import torch

from base.memory import cpus_near
from kvcache.host_memory import HostMemory
from kvcache.paged_pool import PagedKVPool, PagedSequence
from model.loader import choose_backend, load_model, read_spec
from model.passes import PrefillChunk
from model.tiny import write_tiny_checkpoint

CUDA = torch.device("cuda:0")
CHUNK = 2048


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_memory_of_a_long_prompt_grows_with_its_length_alone(tmp_path: Path, backend: str) -> None:
    """Twice the length may take twice the memory; with scores of all pairs it would be four times."""
    write_tiny_checkpoint(tmp_path / "tiny", "deepseek_v32", seed=7, max_position_embeddings=1 << 15)
    dtype = torch.bfloat16
    spec = read_spec(tmp_path / "tiny", dtype, None)
    model = load_model(tmp_path / "tiny", dtype, CUDA, None, choose_backend(backend, CUDA, spec))
    pool = PagedKVPool(spec.kv_layout, num_pages=512, page_size=64, device=CUDA)

    def peak(length: int) -> int:
        pages = pool.allocate(length)
        assert pages is not None
        cache = PagedSequence(pool, pages)
        prompt = torch.randint(0, 256, (length + 1,), device=CUDA)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.inference_mode():
            for start in range(0, length, CHUNK):
                model.prefill([PrefillChunk.of(prompt, start, min(start + CHUNK, length), cache)])
        pool.free(pages)
        return torch.cuda.max_memory_allocated() - before

    peak(CHUNK)  # what is loaded at its first use
    half, whole = peak(1 << 14), peak(1 << 15)
    assert whole < 2.2 * half
    assert whole < 2 << 30, "32K x 32K scores of one head in float32 alone would be 4 GiB"


def test_the_processors_near_the_device_are_known_and_allowed() -> None:
    near = cpus_near(CUDA)
    assert near is None or near <= os.sched_getaffinity(0)
    HostMemory(64 << 20, shareable=True, cpus=near)


def test_bfloat16_on_a_cuda_device_attends_with_triton_by_default(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "tiny", "deepseek_v32", seed=7)
    spec = read_spec(tmp_path / "tiny", torch.bfloat16, None)
    assert choose_backend("auto", CUDA, spec).name == "triton"
