"""`python -m benchmarks.attention`: the attention backends on a GPU, in the shapes of DeepSeek-V3.2.

A decode step's attention and selection are timed inside CUDA graph replays, a prompt chunk's between events. Each turn
of a graph reads rows or pages of its own, more in all than the device caches, as one layer after another does.
`--sweep` times ways to cut the fp8 kernels instead.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks.attention_extras import deep_gemm_scores, flash_mla, flash_mla_prompt
from benchmarks.attention_report import CaseResult, print_results
from benchmarks.device import need_cuda
from benchmarks.documents import check_writable, write_document
from benchmarks.graph_timing import Work, copy_gb_per_s, median_us
from benchmarks.program import run
from kernels import torch_ops
from kernels.attention import AttentionBackend, triton_backend
from kernels.operands import IndexQueries, LayerNorm, PagedKeys, RmsNorm, Rope
from kvcache.format import DenseFormat, Fp8Format

SCHEMA = 4
LATENT_DIM, ITEM_DIM, TOPK = 512, 576, 2048
INDEX_HEADS, INDEX_DIM, PAGE_SIZE = 64, 128, 64
HEADS = (16, 64, 128)
BATCHES = (1, 4, 16, 64)
SCORED = ((1, 32768), (1, 131072), (16, 32768), (16, 65536))
"""Batches and contexts for scores without a selection."""
ENCODED = (1, 64, 4096)
CHUNK = 2048
SCORED_TOGETHER = 512
"""Queries of a prompt that are scored at a time over 32K tokens of context."""
BF16_OPERATIONS_PER_US, FP8_OPERATIONS_PER_US = 800e6, 1600e6

DENSE = DenseFormat(torch.bfloat16, ITEM_DIM, INDEX_DIM)
FP8 = Fp8Format(LATENT_DIM, ITEM_DIM - LATENT_DIM, INDEX_DIM)
_NUM_ROWS = 1 << 20
_UNCACHED_BYTES = 256 << 20
_SCALING = 0.1


@dataclass(frozen=True)
class Case:
    """One thing to time.

    num_bytes: what has to be read or written once, in bfloat16 and in fp8. turns: how often in one graph; 0: none.
    work: for each column what is timed: torch and triton in bfloat16; fp8; `plain`, fp8 by Triton alone, without
    kernels for Hopper; and `extra`, another project's kernel on fp8, if it is installed. tensor_us: what tensor cores
    take for fp8.
    """

    name: str
    batch: int
    num_bytes: tuple[int, int]
    turns: int
    work: dict[str, Work]
    tensor_us: float = 0.0


class Sweep(StrEnum):
    """What to cut in every way."""

    SCORE = "score"
    PROMPT = "prompt"
    ATTEND = "attend"
    COMBINE = "combine"
    ALL = "all"


def main(
    context_length: Annotated[int, typer.Option(min=TOPK, help="Tokens per sequence that are scored.")] = 32768,
    json_path: Annotated[Path, typer.Option("--json")] = Path("bench-attention.json"),
    only: Annotated[str, typer.Option(help="Cases whose name contains this.")] = "",
    sweep: Annotated[Sweep | None, typer.Option(help="Time ways to cut the fp8 kernels.")] = None,
) -> None:
    """Time the torch and the Triton backend side by side, and Triton on fp8 KV."""
    need_cuda("the attention benchmark")
    check_writable(json_path)
    torch.set_default_device("cuda")
    if sweep is not None:
        from benchmarks.attention_sweep import run_sweep

        run_sweep("" if sweep is Sweep.ALL else sweep, Console())
        return
    results = []
    for make in cases(context_length):
        if only in make.name:
            case = make.case()
            us = {name: median_us(work, case.turns) for name, work in case.work.items()}
            results.append(CaseResult(case.name, case.batch, case.num_bytes, us, case.tensor_us))
    bandwidth = copy_gb_per_s()
    shapes = (
        f"items of {ITEM_DIM}, top-k {TOPK}; selection: {INDEX_HEADS} heads of {INDEX_DIM} over {context_length} tokens"
    )
    print_results(results, shapes, bandwidth, Console())
    content = {
        "schema": SCHEMA,
        "device": torch.cuda.get_device_name(),
        "context_length": context_length,
        "copy_gb_per_s": bandwidth,
        "results": [asdict(result) for result in results],
    }
    write_document(json_path, content, indent=2)


@dataclass(frozen=True)
class Made:
    """A case that is made when it is its turn, since its tensors are large."""

    name: str
    case: Callable[[], Case]


def cases(context_length: int) -> Iterator[Made]:
    """What a decode step does at each batch size, then what a prompt's chunk does at the end of its context."""
    for heads in HEADS:
        name = f"attend, {heads} heads"
        yield from (Made(name, partial(attend_case, name, heads, batch)) for batch in BATCHES)
    for batch, context in SCORED:
        name = f"score {context} tokens"
        yield Made(name, partial(score_case, name, batch, context))
    for batch in BATCHES:
        yield Made("select", partial(decode_selection_case, "select", batch, context_length))
    for tokens in ENCODED:
        yield Made("encode items", partial(encode_items_case, "encode items", tokens))
        yield Made("encode index keys", partial(encode_index_keys_case, "encode index keys", tokens))
    for heads in (16, 128):
        name = f"attend a chunk, {heads} heads"
        yield Made(name, partial(attend_prompt_case, name, heads, context_length))
    name = "score a chunk"
    yield Made(name, partial(prompt_score_case, name, context_length))
    yield Made("select for a chunk", partial(prompt_selection_case, "select for a chunk", context_length))


def backends() -> dict[str, AttentionBackend]:
    """What each column attends and selects with."""
    return {"torch": AttentionBackend(DENSE), "triton": triton_backend(DENSE), "fp8": triton_backend(FP8)}


def attend_case(name: str, heads: int, queries: int) -> Case:
    """Attention of queries to TOPK rows each."""
    from kernels.triton.attend import attend_fp8_rows

    num_bytes = (queries * TOPK * DENSE.item_bytes, queries * TOPK * FP8.item_bytes)
    turns = max(2, -(-_UNCACHED_BYTES // num_bytes[1]))
    items = torch.randn(_NUM_ROWS, ITEM_DIM, dtype=torch.bfloat16)
    stored = {"fp8": FP8.encode_items(items)}
    stored["torch"] = stored["triton"] = DENSE.encode_items(items)
    query = torch.randn(queries, heads, ITEM_DIM, dtype=torch.bfloat16)
    rows = torch.randint(0, _NUM_ROWS, (turns, queries, TOPK))

    def work(backend: AttentionBackend, kv: torch.Tensor) -> Work:
        return lambda turn: backend.attend_rows(query, kv, rows[turn], _SCALING, LATENT_DIM)

    def plain(turn: int) -> torch.Tensor:
        return attend_fp8_rows(query, stored["fp8"], rows[turn], _SCALING, FP8, use_cuda_kernel=False)

    columns = {key: work(by, stored[key]) for key, by in backends().items()}
    columns["plain"] = plain
    if extra := flash_mla(query, stored["fp8"], rows, _SCALING):
        columns["extra"] = extra
    return Case(name, queries, num_bytes, turns, columns, attention_us(queries, heads))


def attention_us(queries: int, heads: int) -> float:
    """What tensor cores take to attend to TOPK items each."""
    return 2 * queries * heads * TOPK * (ITEM_DIM + LATENT_DIM) / BF16_OPERATIONS_PER_US


def attend_prompt_case(name: str, heads: int, context_length: int) -> Case:
    """Attention of a prompt's last tokens to TOPK of its positions each, which lie in any rows."""
    from kernels.triton.attend import attend_fp8_rows

    items = torch.randn(context_length, ITEM_DIM, dtype=torch.bfloat16)
    stored = {"fp8": FP8.encode_items(items)}
    stored["torch"] = stored["triton"] = DENSE.encode_items(items)
    query = torch.randn(CHUNK, heads, ITEM_DIM, dtype=torch.bfloat16)
    rows = torch.cat((torch.randperm(context_length), torch.full((1,), -1)))
    positions = torch.rand(CHUNK, context_length).topk(TOPK).indices.sort().values

    def work(backend: AttentionBackend, kv: torch.Tensor) -> Work:
        return lambda _: backend.attend_prompt(query, kv, rows, positions, _SCALING, LATENT_DIM)

    def plain(_: int) -> torch.Tensor:
        return attend_fp8_rows(query, stored["fp8"], rows[positions], _SCALING, FP8, use_cuda_kernel=False)

    columns = {key: work(by, stored[key]) for key, by in backends().items()}
    columns["plain"] = plain
    if extra := flash_mla_prompt(query, items, positions, _SCALING):
        columns["extra"] = extra
    num_bytes = (context_length * DENSE.item_bytes, context_length * FP8.item_bytes)
    return Case(name, CHUNK, num_bytes, 0, columns, attention_us(CHUNK, heads))


@dataclass(frozen=True)
class Sequences:
    """Requests of one length, whose index keys lie in shuffled pages; a page table for each turn."""

    num_bytes: tuple[int, int]
    turns: int
    keys: dict[str, torch.Tensor]
    tables: torch.Tensor
    seq_lens: torch.Tensor

    @classmethod
    def random(cls, batch: int, context_length: int) -> "Sequences":
        pages_each = -(-context_length // PAGE_SIZE)
        tokens = batch * pages_each * PAGE_SIZE
        turns = max(2, -(-_UNCACHED_BYTES // (tokens * FP8.index_key_bytes)))
        keys = torch.randn(turns * tokens, INDEX_DIM, dtype=torch.bfloat16)
        paged = {"fp8": FP8.encode_index_keys(keys).view(-1, PAGE_SIZE, FP8.index_key_bytes)}
        paged["torch"] = paged["triton"] = DENSE.encode_index_keys(keys).view(-1, PAGE_SIZE, DENSE.index_key_bytes)
        return cls(
            num_bytes=(tokens * DENSE.index_key_bytes, tokens * FP8.index_key_bytes),
            turns=turns,
            keys=paged,
            tables=torch.randperm(len(paged["fp8"])).view(turns, batch, pages_each),
            seq_lens=torch.full((batch,), context_length),
        )

    def pages(self, column: str, turn: int) -> PagedKeys:
        return PagedKeys(self.keys[column], self.tables[turn], self.seq_lens)


def decode_selection_case(name: str, batch: int, context_length: int) -> Case:
    """Scores and top-k of one new token of each request; in fp8 with the encoding of its queries."""
    given, index = Sequences.random(batch, context_length), index_inputs(batch)

    def work(column: str, backend: AttentionBackend) -> Work:
        return lambda turn: backend.select_for_decode(index, given.pages(column, turn), TOPK)

    by_column = {column: work(column, backend) for column, backend in backends().items()}
    return Case(name, batch, given.num_bytes, given.turns, by_column)


def score_case(name: str, batch: int, context_length: int) -> Case:
    """Scores alone, of queries that are encoded already."""
    from kernels.triton.encode import encode_index_queries
    from kernels.triton.index_scores import StoredKeys, decode_scores

    given, index = Sequences.random(batch, context_length), index_inputs(batch)
    encoded = encode_index_queries(index)
    dense, fp8 = StoredKeys(DENSE.index_keys(given.keys["triton"])), StoredKeys.fp8(given.keys["fp8"], INDEX_DIM)
    work: dict[str, Work] = {
        "triton": lambda turn: decode_scores(index, given.pages("triton", turn), dense),
        "fp8": lambda turn: decode_scores(encoded, given.pages("fp8", turn), fp8),
        "plain": lambda turn: decode_scores(encoded, given.pages("fp8", turn), fp8, use_cuda_kernel=False),
    }
    if extra := deep_gemm_scores(encoded, given.keys["fp8"], given.tables, given.seq_lens):
        work["extra"] = extra
    return Case(name, batch, given.num_bytes, given.turns, work, score_us(batch * context_length))


def score_us(products: int) -> float:
    """What tensor cores take to multiply so many pairs of a token's queries and a key in fp8."""
    return 2 * products * INDEX_HEADS * INDEX_DIM / FP8_OPERATIONS_PER_US


def prompt_score_case(name: str, context_length: int) -> Case:
    """Scores alone of the last tokens of a prompt, of queries that are encoded already."""
    from kernels.triton.encode import encode_index_queries
    from kernels.triton.index_scores import StoredKeys, prompt_scores

    start = context_length - SCORED_TOGETHER
    encoded = encode_index_queries(index_inputs(SCORED_TOGETHER))
    stored = FP8.encode_index_keys(torch.randn(context_length, INDEX_DIM))
    keys = StoredKeys.fp8(stored, INDEX_DIM)
    written = 4 * SCORED_TOGETHER * context_length
    work: dict[str, Work] = {
        "fp8": lambda _: prompt_scores(encoded, keys, start),
        "plain": lambda _: prompt_scores(encoded, keys, start, use_cuda_kernel=False),
    }
    num_bytes = (0, stored.nbytes + encoded.queries.nbytes + written)
    return Case(name, SCORED_TOGETHER, num_bytes, 4, work, score_us(SCORED_TOGETHER * context_length))


def prompt_selection_case(name: str, context_length: int) -> Case:
    """Scores and top-k of the last CHUNK tokens of a prompt."""
    keys = torch.randn(context_length, INDEX_DIM, dtype=torch.bfloat16)
    stored = {"fp8": FP8.encode_index_keys(keys)}
    stored["torch"] = stored["triton"] = DENSE.encode_index_keys(keys)
    index, start = index_inputs(CHUNK), context_length - CHUNK

    def work(column: str, backend: AttentionBackend) -> Work:
        return lambda _: backend.select_for_prompt(index, stored[column], start, context_length, TOPK)

    by_column = {column: work(column, backend) for column, backend in backends().items()}
    return Case(name, CHUNK, (stored["torch"].nbytes, stored["fp8"].nbytes), 0, by_column)


def encode_items_case(name: str, tokens: int) -> Case:
    """Norm, rotation and bytes of fp8 items: torch operation by operation, and the kernel."""
    from kernels.triton.encode import encode_items

    compressed, weight = torch.randn(tokens, ITEM_DIM).bfloat16(), torch.randn(LATENT_DIM).bfloat16()
    rope = _rope(tokens)

    def by_torch(_: int) -> torch.Tensor:
        latent, key = compressed[:, :LATENT_DIM], compressed[:, LATENT_DIM:]
        normed = torch.nn.functional.rms_norm(latent, weight.shape, weight, 1e-6)
        items = torch_ops.rotate(key.unsqueeze(1), normed.unsqueeze(1), rope, interleaved=True, beside_first=True)
        return FP8.encode_items(items.squeeze(1))

    norm = RmsNorm(weight, 1e-6)
    work: dict[str, Work] = {
        "torch": by_torch,
        "fp8": lambda _: encode_items(compressed, norm, rope, FP8),
    }
    return Case(name, tokens, (compressed.nbytes, tokens * FP8.item_bytes), 20, work)


def encode_index_keys_case(name: str, tokens: int) -> Case:
    """Norm, rotation, Hadamard and bytes of fp8 index keys, as above."""
    from kernels.triton.encode import encode_index_keys

    projected = torch.randn(tokens, INDEX_DIM).bfloat16()
    norm = LayerNorm(torch.randn(INDEX_DIM).bfloat16(), torch.randn(INDEX_DIM).bfloat16(), 1e-6)
    rope = _rope(tokens)

    def by_torch(_: int) -> torch.Tensor:
        normed = torch.nn.functional.layer_norm(projected, (INDEX_DIM,), norm.weight, norm.bias, norm.eps).unsqueeze(1)
        rope_dim = ITEM_DIM - LATENT_DIM
        rotated, rest = normed.tensor_split((rope_dim,), dim=-1)
        keys = torch_ops.rotate(rotated, rest, rope, interleaved=False, beside_first=False)
        return FP8.encode_index_keys(keys.squeeze(1))

    work: dict[str, Work] = {
        "torch": by_torch,
        "fp8": lambda _: encode_index_keys(projected, norm, rope, False, FP8),
    }
    return Case(name, tokens, (projected.nbytes, tokens * FP8.index_key_bytes), 20, work)


def _rope(tokens: int) -> Rope:
    angles = torch.rand(tokens, 1, (ITEM_DIM - LATENT_DIM) // 2)
    return Rope(angles.cos().bfloat16(), angles.sin().bfloat16())


def index_inputs(tokens: int) -> IndexQueries:
    return IndexQueries.of(
        queries=torch.randn(tokens, INDEX_HEADS, INDEX_DIM, dtype=torch.bfloat16),
        head_weights=torch.randn(tokens, INDEX_HEADS),
    )


if __name__ == "__main__":
    run(main)
