"""Teacher-forced logits of models with published widths are as near to float32 as a plain computation in fp8."""

import pytest
import torch

from benchmarks.logits.checkpoint import PublishedShape
from benchmarks.logits.compare import compare
from kernels.ops import fp8_unavailable_reason

CUDA = torch.device("cuda", 0)
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or fp8_unavailable_reason(CUDA, torch.bfloat16) is not None,
    reason="needs a GPU that multiplies fp8",
)


@pytest.mark.parametrize("shape", ["deepseek-v3.2", "glm-5.2"])
def test_logits_are_as_near_to_float32_as_the_published_arithmetic(shape: PublishedShape) -> None:
    """Of a text that is selected as a whole, so that no selection differs; `python -m benchmarks.logits` has others."""
    for result in compare(shape, [1024], CUDA):
        assert result.all_selected
        assert result.worst <= 1.1, result
