"""Products of whole chunks of prompts by DeepGEMM (`hisparse-pd[deepgemm]`), against the plain-torch reference."""

import pytest
import torch

from kernels import fp8
from tests.kernels.fp8_cases import close, expected_experts, expert_case, randn, weight

pytest.importorskip("triton")
pytest.importorskip("deep_gemm")

from kernels.deep_gemm import deep_gemm
from kernels.triton import fp8_experts
from tests.kernels.fp8_kernels import experts, linear

CUDA = "cuda"
pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
)


@pytest.fixture(autouse=True)
def library_works() -> None:
    assert deep_gemm(4096, torch.device(CUDA, 0)) is not None, "DeepGEMM was refused: see the log"


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize(("tokens", "n", "k"), [(3072, 2240, 7168), (8192, 4096, 1536), (3072, 576, 1024)])
def test_a_linear_layer(tokens: int, n: int, k: int, power_of_two: bool) -> None:
    x = randn(tokens, k, device=CUDA).bfloat16()
    values, scales = weight(n, k, device=CUDA)
    close(linear(x, values, scales, power_of_two), fp8.linear(x, values, scales, power_of_two))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("tokens", [3072, 9216])
def test_experts(tokens: int, power_of_two: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """9216 tokens are halved: the rows of all would not fit."""
    monkeypatch.setattr(fp8_experts, "_MOST", 4096)
    case = expert_case(tokens, 8, 32, 1024, 256, 64, 2, power_of_two, CUDA)
    close(experts(*case), expected_experts(*case), 0.01)
    own = range(tokens // 3, tokens - 5)
    close(experts(*case, own), expected_experts(*case, own), 0.01)


def test_experts_of_real_shapes() -> None:
    case = expert_case(8192, 8, 32, 7168, 2048, 256, first=64, device=CUDA)
    close(experts(*case), expected_experts(*case), 0.01)


def test_tokens_that_chose_no_expert_here_get_zeros() -> None:
    assert not experts(*expert_case(3072, 2, 4, 512, 256, 8, first=100, device=CUDA)).any()
