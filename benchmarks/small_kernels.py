"""`python -m benchmarks.small_kernels`: float32 projections of few rows and what reads them, in DeepSeek-V3.2's shapes.

Medians of CUDA graph replays. Each turn of a graph has a weight of its own, more in all than the device caches; what
the kernel before has just written is in the cache, as it is in a step. `--sweep` times other cuts of the products.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.device import need_cuda
from benchmarks.graph_timing import Work, copy_gb_per_s, median_us
from benchmarks.program import run
from benchmarks.tables import table
from kernels.operands import IndexQueries, LayerNorm, PartialSums, Rope, RouterConfig
from kvcache.format import Fp8Format

HIDDEN, EXPERTS, HEADS, DIM = 7168, 256, 64, 128
TOKENS = (1, 8, 16, 128)
FORMAT = Fp8Format(512, 64, DIM)
RULE = RouterConfig(EXPERTS, 8, 8, 4, True, 2.5)
CUTS = ((16, 128), (16, 256), (16, 512), (32, 128), (32, 256), (32, 512), (64, 128), (64, 256), (64, 512))
"""Rows and channels of one program."""

_UNCACHED_BYTES = 128 << 20


@dataclass(frozen=True)
class Case:
    """Something to compute for some tokens. num_bytes: read and written once. turns: of one graph.

    torchs: by torch's kernels as far as there are any that do not take a hundred. ours: by this project's.
    """

    name: str
    tokens: int
    num_bytes: int
    turns: int
    torchs: Work | None
    ours: Work


def main(sweep: Annotated[bool, typer.Option(help="Time other cuts of the products instead.")] = False) -> None:
    """Time the small kernels of routers and indexers."""
    need_cuda("the benchmark of small kernels")
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    console = Console()
    console.print(_swept() if sweep else _results(copy_gb_per_s()))
    console.print(f"Microseconds, medians in CUDA graphs. {torch.cuda.get_device_name()}", highlight=False)


def _results(bandwidth: float) -> Table:
    """A line per case and number of tokens. bandwidth: GB/s of a copy, of the limit."""
    shown = table("", "tokens", "limit", "torch", "ours", words=("",))
    for tokens in TOKENS:
        for case in (*router_cases(tokens), *indexer_cases(tokens), key_case(tokens)):
            theirs = "" if case.torchs is None else f"{median_us(case.torchs, case.turns):.2f}"
            ours = median_us(case.ours, case.turns)
            shown.add_row(case.name, str(tokens), f"{case.num_bytes / bandwidth / 1e3:.2f}", theirs, f"{ours:.2f}")
    return shown


def router_cases(tokens: int) -> Iterator[Case]:
    """The product alone, the choice alone, and both."""
    from kernels.triton.router import choose_experts, partial_products

    x, weights, bias = _x(tokens), _weights(EXPERTS), torch.zeros(EXPERTS)

    def product(turn: int) -> torch.Tensor:
        return torch.mm(x, weights[turn].t(), out_dtype=torch.float32)

    num_bytes, turns = weights[0].nbytes + x.nbytes, len(weights)
    logits, parts = PartialSums.of(product(0)), PartialSums(partial_products(x, weights[0]))
    yield Case("router: product", tokens, num_bytes, turns, product, lambda turn: partial_products(x, weights[turn]))
    yield Case(
        "router: choice, of one part and of all",
        tokens,
        parts.parts.nbytes,
        turns,
        lambda _: choose_experts(logits, bias, RULE),
        lambda _: choose_experts(parts, bias, RULE),
    )
    yield Case(
        "router",
        tokens,
        num_bytes,
        turns,
        lambda turn: choose_experts(PartialSums.of(product(turn)), bias, RULE),
        lambda turn: choose_experts(PartialSums(partial_products(x, weights[turn])), bias, RULE),
    )


def indexer_cases(tokens: int) -> Iterator[Case]:
    """The product alone, of a weight in bfloat16 and in float32; the queries alone; and both."""
    from kernels.triton.encode import encode_index_queries
    from kernels.triton.router import partial_products

    x, weights, scale = _x(tokens), _weights(HEADS), HEADS**-0.5
    queries = torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16)
    wide = [weight.float() for weight in weights]

    def product(turn: int) -> torch.Tensor:
        logits: torch.Tensor = F.linear(x.float(), wide[turn]) * scale
        return logits

    num_bytes, turns = weights[0].nbytes + x.nbytes, len(weights)
    one, parts = PartialSums.of(product(0)), PartialSums(partial_products(x, weights[0]), scale)
    yield Case("head weights", tokens, num_bytes, turns, product, lambda turn: partial_products(x, weights[turn]))
    yield Case(
        "head weights, stored in float32",
        tokens,
        wide[0].nbytes + x.nbytes,
        turns,
        None,
        lambda turn: partial_products(x, wide[turn]),
    )
    encoded = tokens * HEADS * (3 * DIM + 4)
    yield Case(
        "queries, of one part and of all",
        tokens,
        encoded + parts.parts.nbytes,
        turns,
        lambda _: encode_index_queries(IndexQueries(queries, one)),
        lambda _: encode_index_queries(IndexQueries(queries, parts)),
    )

    def both(turn: int) -> object:
        return encode_index_queries(IndexQueries(queries, PartialSums(partial_products(x, weights[turn]), scale)))

    yield Case(
        "head weights and queries",
        tokens,
        num_bytes + encoded,
        turns,
        lambda turn: encode_index_queries(IndexQueries.of(queries, product(turn))),
        both,
    )


def key_case(tokens: int) -> Case:
    """Norm, rotation, Hadamard matrix and bytes of index keys; no turn has a norm of its own."""
    from kernels.triton.encode import encode_index_keys

    projected = torch.randn(tokens, DIM, dtype=torch.bfloat16)
    norm = LayerNorm(torch.randn(DIM).bfloat16(), torch.randn(DIM).bfloat16(), 1e-6)
    angles = torch.rand(tokens, 1, FORMAT.rope_dim // 2)
    rope = Rope(angles.cos().bfloat16(), angles.sin().bfloat16())
    num_bytes = projected.nbytes + tokens * FORMAT.index_key_bytes
    return Case(
        "index keys",
        tokens,
        num_bytes,
        50,
        None,
        lambda _: encode_index_keys(projected, norm, rope, False, FORMAT),
    )


def _swept() -> Table:
    """A line per reader and number of tokens, of products and what reads them; a column per cut."""
    from kernels.triton.encode import encode_index_queries
    from kernels.triton.router import choose_experts, partial_products

    shown = table("", "tokens", *(f"{rows}x{channels}" for rows, channels in CUTS), words=("",))
    bias = torch.zeros(EXPERTS)
    for name, weights in (("router", _weights(EXPERTS)), ("head weights and queries", _weights(HEADS))):
        for tokens in TOKENS:
            x, queries = _x(tokens), torch.randn(tokens, HEADS, DIM, dtype=torch.bfloat16)

            def both(
                turn: int,
                cut: tuple[int, int],
                x: torch.Tensor = x,
                queries: torch.Tensor = queries,
                weights: torch.Tensor = weights,
            ) -> object:
                sums = PartialSums(partial_products(x, weights[turn], *cut))
                if weights.shape[1] == EXPERTS:
                    return choose_experts(sums, bias, RULE)
                return encode_index_queries(IndexQueries(queries, sums))

            times = (median_us(partial(both, cut=cut), len(weights)) for cut in CUTS)
            shown.add_row(name, str(tokens), *(f"{us:.2f}" for us in times))
    return shown


def _x(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, dtype=torch.bfloat16)


def _weights(rows: int) -> torch.Tensor:
    """Weights of a shape, too many for the device's cache."""
    count = max(32, _UNCACHED_BYTES // (2 * rows * HIDDEN))
    return 0.02 * torch.randn(count, rows, HIDDEN, dtype=torch.bfloat16)


if __name__ == "__main__":
    run(main)
