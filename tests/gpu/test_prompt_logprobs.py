"""Log probabilities of a prompt that a device computes, in chunks, are those of the processor."""

from pathlib import Path

import numpy as np
import pytest
import torch

from control.prompt_logprobs import PromptLogprobTable
from engine.chunked import ChunkedPrefill, PrefillJob
from kvcache.paged_pool import PagedKVPool
from model.loader import load_model
from model.tiny import write_tiny_checkpoint

PROMPT = torch.randint(0, 256, (300,), generator=torch.Generator().manual_seed(3)).tolist()
TOP = 5


def computed(checkpoint: Path, device: torch.device, dtype: torch.dtype) -> PromptLogprobTable:
    """Of the whole prompt, computed beside one that asks for none."""
    model = load_model(checkpoint, dtype, device)
    prefill: ChunkedPrefill[PrefillJob] = ChunkedPrefill(PagedKVPool(model.spec.kv_layout, 64, 16, device), 128)
    other = PrefillJob(torch.tensor(PROMPT[:51]))
    job = PrefillJob(torch.tensor(PROMPT), prompt_logprobs=TOP)
    prefill.add(other)
    prefill.add(job)
    prefill.start_waiting()
    table = PromptLogprobTable(len(PROMPT), TOP)
    while (step := prefill.plan()) is not None:
        for asked, queued in step.compute(model).items():
            assert asked is job
            table.add(queued.wait())
        prefill.complete(step)
    assert table.complete
    return table


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.2)])
def test_a_device_says_what_the_processor_says(tmp_path: Path, dtype: torch.dtype, tolerance: float) -> None:
    write_tiny_checkpoint(tmp_path, "deepseek_v32", seed=1)
    expected = computed(tmp_path, torch.device("cpu"), torch.float32)
    found = computed(tmp_path, torch.device("cuda"), dtype)
    assert np.median(np.abs(found.floats - expected.floats)) < tolerance
    if dtype == torch.float32:
        assert np.abs(found.floats - expected.floats).max() < tolerance
        assert (found.ints[:, 1] == expected.ints[:, 1]).mean() > 0.99, "the likeliest token at each position"
