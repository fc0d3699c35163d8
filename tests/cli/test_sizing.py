"""What `hisparse-pd sizing` says is what its formulas give, worked out here once more, in numbers as published."""

from dataclasses import replace
from pathlib import Path

import pytest

from base.errors import StartupError
from cli.config import SizingConfig
from cli.main import main
from cli.sizing import NodeSizing, commands, rows
from tests.deploy.program import read_shell

GIB = 2**30
HBM, TENSOR, FP8_TENSOR = 4.8e9, 800e9, 1600e9
"""Bytes and operations in a millisecond."""
RANKS, CONTEXT, NEW = 8, 65536, 275
DEEPSEEK = 7168, 128, (128, 64, 128), 1536, 64, 18432, 129280
GLM = 6144, 64, (192, 64, 256), 2048, 32, 12288, 154880
BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks.md"


@pytest.fixture(scope="module")
def deepseek() -> NodeSizing:
    return NodeSizing(SizingConfig(shape="deepseek-v3.2", speculative_num_steps="0", device_buffer_size=4096))


@pytest.fixture(scope="module")
def glm() -> NodeSizing:
    return NodeSizing(SizingConfig(shape="glm-5.2", speculative_num_steps="0", device_buffer_size=4096))


def published_weights(
    layers: int,
    indexers: int,
    hidden: int,
    heads: int,
    dims: tuple[int, int, int],
    query: int,
    index_heads: int,
    dense: int,
    vocabulary: int,
) -> float:
    """Bytes of a rank's weights: a byte for each in fp8, and two where it is not. dims: nope, RoPE, value."""
    nope, rope, value = dims
    in_fp8 = layers * (hidden * (query + 512 + rope) + query * heads * (nope + rope) + heads * value * hidden)
    in_fp8 += indexers * (query * index_heads * 128 + hidden * 128)
    in_fp8 += 3 * 3 * hidden * dense + (layers - 3) * (256 // RANKS + 1) * 3 * hidden * 2048
    others = layers * 512 * heads * (nope + value) + indexers * hidden * index_heads
    others += 2 * vocabulary * hidden + (layers - 3) * 256 * hidden
    return in_fp8 + 2 * others


def test_weights_are_what_all_ranks_have_and_a_part_of_the_experts(deepseek: NodeSizing, glm: NodeSizing) -> None:
    """Up to scales and norms; docs/benchmarks.md has what was loaded onto a GPU for one of eight."""
    expected = published_weights(61, 61, *DEEPSEEK)
    assert deepseek.model.num_bytes == pytest.approx(expected, rel=0.005)
    expected = published_weights(78, 21, *GLM)
    assert glm.model.num_bytes == pytest.approx(expected, rel=0.005)
    for name, layers, node in (("DeepSeek-V3.2", 61, deepseek), ("GLM-5.2", 78, glm)):
        assert f"{name}, {layers} layers ({node.model.num_bytes / GIB:.1f} GiB)" in BENCHMARKS.read_text()


def test_host_memory(deepseek: NodeSizing, glm: NodeSizing) -> None:
    assert deepseek.token_bytes == 61 * 656 + 61 * 132
    assert glm.token_bytes == 78 * 656 + 21 * 132
    for x in (deepseek, glm):
        tables = x.host_pool_gib * GIB / x.token_bytes / 64 * 456
        assert x.host_pool_gib * GIB + tables <= (2048 - 256) * GIB < (x.host_pool_gib + 1) * GIB + tables
        assert x.held == int(x.host_pool_gib * GIB / RANKS / x.token_bytes / CONTEXT)


SLABS = {61: (336, 26 * 64, 39 * 346_368), 78: (128, 37 * 64, 19 * 346_368)}
"""By number of layers: hot slots, tokens and bytes of a slab, a multiple of 656 and of 64 x 132."""


def slabs_and_tables(layers: int, index_layers: int) -> tuple[int, int, int, int]:
    """By the formulas of docs/operations/install.md: bytes of a slab, slabs of a hot buffer and of a request's index
    keys, and a request's tables."""
    (s, t, num_bytes), g, h = SLABS[layers], 16, 4096
    hot, keys = -(-(h + 1) // s), -(-CONTEXT // t)
    tables = 8 * (1 + -(-CONTEXT // s) * s // g + keys * t // 64 + CONTEXT) + index_layers * (2 * CONTEXT + 5 * h + 4)
    return num_bytes, hot, keys, tables


def device_bytes(layers: int, index_layers: int, running: int) -> int:
    slab, hot, keys, tables = slabs_and_tables(layers, index_layers)
    return running * ((hot + keys) * slab + tables)


def test_requests_that_run(deepseek: NodeSizing, glm: NodeSizing) -> None:
    for x, layers, index_layers in ((deepseek, 61, 61), (glm, 78, 21)):
        assert x.pool_bytes == int(0.8 * (139 * GIB - x.model.num_bytes))
        assert device_bytes(layers, index_layers, x.fitting) <= x.pool_bytes
        assert device_bytes(layers, index_layers, x.fitting + 1) > x.pool_bytes
        assert x.running == min(x.held, x.fitting)
        sizes = x.sizes(x.running, x.host_pool_gib / RANKS)
        assert sizes.has_all_buffers, "every request has a full hot buffer"
        assert sizes.num_host_slots >= x.running * CONTEXT, "and its KV in host memory"


def test_requests_that_are_whole(deepseek: NodeSizing, glm: NodeSizing) -> None:
    """Beside them there are slabs for two hot buffers, and for the index keys of the next request."""
    for x, layers, index_layers in ((deepseek, 61, 61), (glm, 78, 21)):
        slab, hot, keys, tables = slabs_and_tables(layers, index_layers)
        slabs = (x.pool_bytes - x.running * tables) // slab
        assert 0 < x.whole == (slabs - 2 * hot - keys) // (-(-CONTEXT // SLABS[layers][0]) + keys) < x.running
        swapping = sum(work.ms(55.0) for work in x.step["swap-in"])
        assert x.whole_step_limit_ms < x.step_limit_ms - swapping


def test_steps_and_tokens(deepseek: NodeSizing) -> None:
    """DeepSeek-V3.2's, part by part: the limits of memory or tensor cores, whichever is larger."""
    x, n = deepseek, deepseek.running
    part = {name: sum(w.ms(55.0) for w in works) for name, works in x.step.items()}
    assert part["swap-in"] == pytest.approx(61 * n * NEW * 656 / 55e6)
    index_operations = 2 * 61 * n * CONTEXT * 64 * 128
    assert part["index"] == pytest.approx(max(61 * n * CONTEXT * 132 / HBM, index_operations / FP8_TENSOR))
    assert part["top-k"] == pytest.approx(61 * n * CONTEXT * 4 / HBM)
    attention_operations = 2 * 61 * n * 2048 * 128 * (576 + 512)
    assert part["attention"] == pytest.approx(max(61 * n * 2048 * 656 / HBM, attention_operations / TENSOR))
    # With some 400 tokens in the group, every expert is hit by some.
    assert part["experts"] == pytest.approx(58 * 33 * 3 * 7168 * 2048 / HBM, rel=0.01)
    assert x.step_limit_ms == pytest.approx(sum(part.values()))
    assert x.step_ms == pytest.approx(1.7 * x.step_limit_ms)
    assert x.tokens_per_s(n, x.step_ms) == pytest.approx(8 * n / x.step_ms * 1000)
    assert x.swapped_in_bytes == 61 * n * NEW * 656


def test_two_machines_hold_twice_the_requests_of_each_in_host_memory(deepseek: NodeSizing) -> None:
    two = NodeSizing(replace(deepseek.config, ranks=16, nnodes=2))
    assert two.held == deepseek.held, "of a rank; there are twice as many"
    assert two.fitting > deepseek.fitting, "whose weights are fewer"


def test_commands_are_printed_with_every_figure_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sizing"])
    printed, config = capsys.readouterr().out, SizingConfig()
    assert printed.startswith("\n".join(commands(config)))
    assert max(map(len, printed.splitlines())) <= 80
    for row in rows(config):
        assert row.value in printed
    lines = [read_shell(each) for each in commands(config)]
    assert [line.command for line in lines] == ["gateway", "prefill", "decode"]
    assert [line.values["context_length"] for line in lines] == [CONTEXT] * 3
    _, prefill, decode = (line.values for line in lines)
    assert prefill["ranks"] == decode["ranks"] == 8
    assert decode["max_running_requests"] == NodeSizing(config).running


def test_a_node_that_drafts_has_one_layer_more(deepseek: NodeSizing, glm: NodeSizing) -> None:
    """And a projection from twice its width, in bfloat16."""
    for x, sizes, layers, index_layers in ((deepseek, DEEPSEEK, 61, 61), (glm, GLM, 78, 21)):
        drafting = NodeSizing(replace(x.config, speculative_num_steps="3"))
        layer = published_weights(layers + 1, index_layers + 1, *sizes) - published_weights(
            layers, index_layers, *sizes
        )
        more = drafting.model.num_bytes - x.model.num_bytes
        assert more == pytest.approx(layer + 2 * 2 * sizes[0] ** 2, rel=0.005)
        assert drafting.token_bytes == (layers + 1) * 656 + (index_layers + 1) * 132
        assert [" --speculative-num-steps 3" in each for each in commands(drafting.config)] == [False, True, True]


def test_what_does_not_fit_is_refused_by_name() -> None:
    for config, refusal in (
        (SizingConfig(ranks=1), r"^sizing: the weights of one of 1 ranks take .* GiB, the device has 139: give more"),
        (SizingConfig(ranks=3), "^sizing: "),
        (SizingConfig(ranks=8, nnodes=3), "^--ranks 8 with --nnodes 3: each host has as many"),
        (SizingConfig(host_gib=200.0), "^--host-gib 200 with --reserved-gib 256: nothing is left"),
    ):
        with pytest.raises(StartupError, match=refusal):
            rows(config)


@pytest.mark.parametrize(
    ("flags", "refusal", "longest"),
    [
        ("", "a prefill node holds 546,598,", 546560),
        ("--kv-cache-dtype bfloat16", "a prefill node holds 309,597,", 309568),
        ("--host-gib 290", "a rank of a decode node 82,113 in host memory", 82112),
        ("--host-gib 257", "a rank of a decode node 0 in host memory", None),
    ],
)
def test_a_prompt_that_fits_nowhere_is_answered_with_one_that_does(
    capsys: pytest.CaptureFixture[str], flags: str, refusal: str, longest: int | None
) -> None:
    sizing = ["sizing", *["--shape", "glm-5.2", "--speculative-num-steps", "0"], *flags.split(), "--context-length"]
    with pytest.raises(SystemExit) as ended:
        main([*sizing, "1048576"])
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert said.startswith("error: sizing: no prompt of 1,048,576 tokens fits: ")
    assert refusal in said
    if longest is None:
        assert "no other length does" in said
        return
    assert f"--context-length {longest} fits" in said
    for length, code in ((longest, 0), (longest + 64, 1)):
        with pytest.raises(SystemExit) as ended:
            main([*sizing, str(length)])
        assert ended.value.code == code
