import torch

from kernels.attention import AttentionBackend
from kernels.operands import RmsNorm, Rope
from kernels.torch_ops import rotate
from kvcache.format import DenseFormat
from model.attention import LatentAttention
from model.weights import Linear


def test_absent_rows_have_no_influence_even_if_unused_rows_hold_nan() -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(10, 12, generator=generator)
    kv[0] = float("nan")
    queries = torch.randn(2, 3, 12, generator=generator)
    rows = torch.tensor([[4, 7, -1, -1], [2, -1, 5, 9]])

    backend = AttentionBackend(DenseFormat(torch.float32, item_dim=12, index_dim=1))
    attended = backend.attend_rows(queries, backend.format.encode_items(kv), rows, scaling=0.3, latent_dim=8)

    for query, present, actual in zip(queries, ([4, 7], [2, 5, 9]), attended, strict=True):
        weights = (query @ kv[present].T * 0.3).softmax(dim=-1)
        torch.testing.assert_close(actual, weights @ kv[present, :8])


def test_the_two_rope_layouts_differ_only_in_the_order_of_their_input() -> None:
    generator = torch.Generator().manual_seed(0)
    angles = torch.rand(5, 4, generator=generator)
    rope = Rope(angles.cos().unsqueeze(1), angles.sin().unsqueeze(1))
    pairs = torch.randn(5, 2, 4, 2, generator=generator)

    beside = torch.randn(5, 2, 3, generator=generator)

    interleaved = rotate(pairs.flatten(-2), beside, rope, interleaved=True, beside_first=True)
    half_split = rotate(pairs.transpose(-1, -2).flatten(-2), beside, rope, interleaved=False, beside_first=False)
    rotated = torch.view_as_complex(pairs) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    torch.testing.assert_close(interleaved, torch.cat((beside, rotated.real, rotated.imag), -1))
    torch.testing.assert_close(half_split, torch.cat((rotated.real, rotated.imag, beside), -1))


def random_attention(
    device: torch.device, dtype: torch.dtype, tokens: int, heads: int = 4
) -> tuple[LatentAttention, torch.Tensor, Rope]:
    """Projections with published widths, queries [tokens, heads * 192], and the rotation of the tokens."""
    generator = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    norm = RmsNorm(randn(64), 1e-6)
    key_map, value_map = (0.1 * randn(heads, 256, 512)).split(128, 1)
    attention = LatentAttention(norm, norm, key_map, value_map, out=Linear(randn(64, heads * 128)))
    angles = randn(tokens, 1, 32)
    return attention, randn(tokens, heads * 192), Rope(angles.cos(), angles.sin())
