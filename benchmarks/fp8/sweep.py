"""Ways to cut products of block-fp8 weights, and what each takes: where the tilings of the kernels come from."""

from functools import partial
from typing import TYPE_CHECKING

import torch
from rich.console import Console

from benchmarks.fp8.layers import LINEAR, ExpertCase, Weight, limit, random_layers, random_moe_layers
from benchmarks.graph_timing import Work, median_us

if TYPE_CHECKING:
    from kernels.triton.fp8_tile import Tiling

_BEST = 6


def sweep_linear(console: Console) -> None:
    """Of few tokens: every way."""
    from kernels.triton import fp8_linear as ours
    from kernels.triton.fp8_quantise import quantise
    from kernels.triton.fp8_tile import Tiling

    def work(turn: int, inputs: tuple[torch.Tensor, torch.Tensor], layers: list[Weight], cut: Tiling) -> object:
        return ours.reduce_fp8(ours.partial_product(*inputs, *layers[turn], cut))

    for name in ("V3.2 q_a, kv_a, index wk", "V3.2 q_b, index wq_b", "V3.2 o_proj"):
        layers = random_layers(*LINEAR[name])
        for tokens in (1, 16):
            x = torch.randn(tokens, LINEAR[name][1], dtype=torch.bfloat16)
            inputs = quantise(x, True)
            times = {
                str(cut): _time(partial(work, inputs=inputs, layers=layers, cut=cut), len(layers))
                for cut in _few()
                if cut.m == max(16, tokens)
            }
            least = limit(layers[0][0].numel(), 0)
            _print_best(f"{name}, {tokens} tokens, limit {least:.1f}", times, console)


def sweep_experts(console: Console) -> None:
    """Of a decode step's tokens."""
    _sweep(console, _few(), (1, 8, 64, 128, 512))


def sweep_prefill(console: Console) -> None:
    """Of a prompt's tokens."""
    from kernels.triton.fp8_tile import Tiling

    many = [
        Tiling(m, n, warps, stages, per_sm, 1, left, registers)
        for m, n, warps, stages, per_sm, left, registers in (
            (128, 256, 8, 3, 1, True, None),
            (128, 256, 8, 4, 1, True, None),
            (128, 128, 8, 4, 1, True, None),
            (128, 128, 8, 6, 1, True, None),
            (128, 128, 8, 3, 2, True, 128),
            (64, 128, 4, 4, 2, True, None),
            (64, 128, 4, 3, 3, True, 168),
            (64, 256, 4, 4, 1, True, None),
            (128, 128, 8, 4, 1, False, None),
        )
    ]
    _sweep(console, many, (2048, 8192, 65536))


def _few() -> list["Tiling"]:
    from kernels.triton.fp8_tile import Tiling

    ways = (
        (64, 4, 4, 1),
        (64, 6, 3, 1),
        (64, 3, 3, 2),
        (128, 4, 2, 1),
        (128, 5, 2, 1),
        (128, 3, 2, 2),
        (128, 3, 3, 1),
        (128, 8, 1, 1),
        (128, 5, 1, 2),
    )
    return [Tiling(m, n, 4, stages, per_sm, unroll) for m in (16, 32, 64) for n, stages, per_sm, unroll in ways]


def _sweep(console: Console, tilings: list["Tiling"], counts: tuple[int, ...]) -> None:
    from kernels.triton import fp8_experts as ours

    layers = random_moe_layers()
    usual = ours.tiling
    try:
        for tokens in counts:
            case = ExpertCase.random(layers, tokens)
            times = {}
            for cut in tilings:
                if cut.warps == 4 and not cut.tokens_left and not _worth_it(cut, tokens):
                    continue
                ours.tiling = partial(_always, cut)
                times[str(cut)] = _time(case.experts, case.turns)
            _print_best(f"experts, {tokens} tokens of the group, limit {case.limit:.1f}", times, console)
    finally:
        ours.tiling = usual


def _worth_it(cut: "Tiling", tokens: int) -> bool:
    """Wide tiles of tokens that do not hold few rows, nor leave few registers."""
    return cut.m == 16 or (cut.m <= tokens // 4 and cut.n == 128 and cut.per_sm <= 2)


def _always(cut: "Tiling", tokens: int) -> "Tiling":
    return cut


def _time(work: Work, turns: int) -> float:
    """Microseconds; infinitely many for a way that the device has no room for."""
    try:
        return median_us(work, turns)
    except Exception as error:
        if type(error).__name__ != "OutOfResources":
            raise
        return float("inf")


def _print_best(heading: str, times: dict[str, float], console: Console) -> None:
    console.print(heading, highlight=False)
    for name, us in sorted(times.items(), key=lambda item: item[1])[:_BEST]:
        console.print(f"  {us:8.1f}  {name}", highlight=False)
