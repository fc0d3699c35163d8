"""Block-fp8 weights and activations: what the numbers mean."""

import pytest
import torch

from kernels import fp8
from tests.kernels.fp8_cases import close, expected_experts, expert_case, part_of, randn, weight


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(128, 128), (576, 300), (1, 1), (3, 200, 130)])
def test_a_weight_is_its_values_times_the_scales_of_their_blocks(shape: tuple[int, ...], power_of_two: bool) -> None:
    whole = randn(*shape)
    values, scales = fp8.quantise_weight(whole, power_of_two)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    back = fp8.dequantise(values, scales, torch.float32)
    for row in range(0, shape[-2], 128):
        for column in range(0, shape[-1], 128):
            block = (..., slice(row, row + 128), slice(column, column + 128))
            scale = scales[..., row // 128, column // 128, None, None]
            assert torch.equal(back[block], values[block].float() * scale)
            amax = whole[block].abs().amax((-2, -1))
            assert (scale.squeeze(-1).squeeze(-1) * 448 >= 0.999999 * amax).all()
            assert ((whole[block] - back[block]).abs() <= 2**-4 * whole[block].abs() + scale * 2**-9).all()
    if power_of_two:
        assert torch.equal(scales.log2(), scales.log2().round())


def test_blocks_of_zeros_and_of_small_numbers_are_quantised() -> None:
    whole = torch.zeros(128, 256)
    whole[:, 128:] = 1e-20 * randn(128, 128)
    back = fp8.dequantise(*fp8.quantise_weight(whole), torch.float32)
    assert torch.equal(back[:, :128], whole[:, :128])
    close(back[:, 128:], whole[:, 128:], 0.05)


@pytest.mark.parametrize(
    ("amax", "scale", "rounded"),
    [(448.0, 1.0, 1.0), (449.0, 449 / 448, 2.0), (3.5, 2**-7, 2**-7), (1.0, 1 / 448, 2**-8), (0.0, 1e-4 / 448, 2**-22)],
)
def test_the_scale_of_activations_is_published(amax: float, scale: float, rounded: float) -> None:
    x = torch.full((1, 128), amax)
    assert fp8.quantise_activations(x, False)[1].item() == pytest.approx(scale, rel=1e-6)
    assert fp8.quantise_activations(x, True)[1].item() == rounded


@pytest.mark.parametrize("power_of_two", [False, True])
def test_activations_are_quantised_per_token_and_128_channels(power_of_two: bool) -> None:
    x = randn(3, 300).bfloat16()
    x[1] *= 1000
    values, scales = fp8.quantise_activations(x, power_of_two)
    assert values.shape == x.shape
    assert scales.shape == (3, 3)
    for token in range(3):
        for block in range(3):
            part = x[token, block * 128 : (block + 1) * 128].float()
            back = values[token, block * 128 : (block + 1) * 128].float() * scales[token, block]
            assert ((part - back).abs() <= 2**-4 * part.abs() + scales[token, block] * 2**-9).all()


def test_a_product_is_that_of_what_values_and_scales_stand_for() -> None:
    x, (values, scales) = randn(5, 400), weight(200, 400)
    quantised, x_scales = fp8.quantise_activations(x, False)
    exact = (quantised.double() * x_scales.repeat_interleave(128, 1)[:, :400]) @ fp8.dequantise(
        values, scales, torch.float64
    ).t()
    close(fp8.product(quantised, x_scales, values, scales, torch.float32).double(), exact, 1e-6)


def test_experts_are_summed_by_weight_wherever_they_are() -> None:
    """Two processes with two experts each compute the halves of what one with four computes."""
    hidden, ids, weights, of = expert_case(6, 3, 4, 256, 128, of=4)
    whole = expected_experts(hidden.float(), ids, weights, of)
    parts = [expected_experts(hidden.float(), ids, weights, part_of(of, own)) for own in (slice(0, 2), slice(2, 4))]
    torch.testing.assert_close(parts[0] + parts[1], whole)
    token = expected_experts(hidden[:1], ids[:1], weights[:1], of)
    expected = 0
    for expert, by in zip(ids[0], weights[0], strict=True):
        gate, up = fp8.linear(hidden[:1], of.gate_up[expert], of.gate_up_scales[expert], True).float().chunk(2, -1)
        inner = (gate * gate.sigmoid() * up).bfloat16()
        expected += by * fp8.linear(inner, of.down[expert], of.down_scales[expert], True).float()
    close(token, expected.bfloat16())


def test_scales_that_are_not_those_of_the_blocks_are_refused() -> None:
    values, scales = weight(576, 256)
    for wrong in (scales[:4], scales.bfloat16(), scales.t()):
        with pytest.raises(ValueError, match=r"float32 scales \[5, 2\] for its shape \[576, 256\]"):
            fp8.dequantise(values, wrong, torch.float32)
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        fp8.dequantise(values.float(), scales, torch.float32)
