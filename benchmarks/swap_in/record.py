"""`python -m benchmarks.swap_in.record`: which positions a model selects while it decodes.

By default the trained model of `benchmarks.passkey`, after a text: what random weights select is nearly random.
One file per index layer, as `benchmarks.swap_in.eviction --trace` reads them. The model runs through the KV tiers as it
does in a decode node, with a hot buffer as large as the context; what it selects does not depend on that.
"""

import random
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.passkey import CHECKPOINT
from benchmarks.passkey.text import passage_ids
from benchmarks.program import run
from benchmarks.stepping import GREEDY, launch, next_tokens, tiers_of_one
from benchmarks.wrapped_backend import WrappedBackend
from control.messages import Sampling
from engine.chunked import ChunkedPrefill, PrefillJob
from engine.runner import ModelRunner
from hisparse.config import HiSparseConfig
from hisparse.coordinator import HiSparseCoordinator
from hisparse.swap_in import StagedKV
from kernels.attention import AttentionBackend
from kernels.operands import IndexQueries, PagedKeys
from kvcache.paged_pool import PagedKVPool
from model.config import ModelSpec
from model.loader import choose_backend, load_model, read_spec, resolve_dtype
from model.sparse_model import SparseModel
from service.node_model import use_device

_PAGE = 64
_CHUNK = 2048
_REQUEST = "recorded"


class RecordingBackend(WrappedBackend):
    """Keeps what was selected for each decoded token."""

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner)
        self.selected: list[torch.Tensor] = []

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        positions = super().select_for_decode(index, pages, topk)
        self.selected.append(positions.cpu())
        return positions


def record(
    checkpoint: Path, prompt_ids: list[int], steps: int, device: torch.device, sampling: Sampling = GREEDY
) -> dict[int, torch.Tensor]:
    """Decode after a prompt. Returns the selected positions, int64 [steps, k], by index layer.

    The newest position of the first step is the last of the prompt. A step that selects fewer than k positions has
    -1 for the rest. Raises StartupError for a checkpoint that cannot be run, or if prompt and steps exceed its context.
    """
    dtype = resolve_dtype(checkpoint, "auto")
    spec = read_spec(checkpoint, dtype, None)
    if len(prompt_ids) + steps > spec.context_length:
        raise StartupError(
            f"{len(prompt_ids)} prompt tokens and {steps} steps: expected at most {spec.context_length} in all"
        )
    backend = RecordingBackend(choose_backend("auto", device, spec))
    model = load_model(checkpoint, dtype, device, None, backend)
    tokens, k = len(prompt_ids) + steps, spec.index_topk
    config = HiSparseConfig(max(tokens, k), k, host_to_device_ratio=1.0, host_pool_gib=None)
    coordinator = tiers_of_one(config, spec.kv_layout, tokens, device)
    pool = PagedKVPool(spec.kv_layout, -(-len(prompt_ids) // _PAGE), _PAGE, device)
    prefill: ChunkedPrefill[PrefillJob] = ChunkedPrefill(pool, _CHUNK)
    _prefill(model, prefill, coordinator, prompt_ids)
    runner = ModelRunner(model, coordinator, 1, spec.context_length, record=False)
    runner.admit(_REQUEST, prompt_ids, [], sampling)
    for key in np.random.default_rng(sampling.seed).integers(2**63, size=steps).tolist():
        coordinator.append_tokens([_REQUEST])
        next_tokens(runner, launch(runner, coordinator, [_REQUEST], sampling), key)
    coordinator.release_host(coordinator.retract_request(_REQUEST))
    coordinator.close()
    return _by_layer(backend.selected, spec)


def _prefill(
    model: SparseModel,
    prefill: ChunkedPrefill[PrefillJob],
    coordinator: HiSparseCoordinator,
    prompt_ids: list[int],
) -> None:
    """Compute the KV of a prompt but for its last token, and admit a request that has it."""
    job = PrefillJob(torch.tensor(prompt_ids))
    prefill.add(job)
    prefill.start_waiting()
    while step := prefill.plan():
        step.compute(model)
        prefill.complete(step)
    slots = coordinator.host.allocate(job.num_tokens)
    assert slots is not None
    if job.cache is not None:
        pool = prefill.pool
        staged = StagedKV(list(pool.kv), list(pool.index_keys), job.cache.rows(0, job.num_tokens), lambda: None)
        coordinator.admit_request_into_staging(_REQUEST, slots, staged, job.num_tokens)
        while not coordinator.staging.poll().landed:
            pass
    coordinator.admit_request_direct(_REQUEST, slots, job.num_tokens)


def _by_layer(selected: list[torch.Tensor], spec: ModelSpec) -> dict[int, torch.Tensor]:
    """Selections come layer after layer, step after step."""
    layers = spec.num_index_layers
    k = max(positions.shape[1] for positions in selected)
    rows = [torch.nn.functional.pad(positions[0], (0, k - positions.shape[1]), value=-1) for positions in selected]
    return {layer: torch.stack(rows[layer::layers]) for layer in range(layers)}


def main(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint directory; default: the trained one.")] = CHECKPOINT,
    prompt: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Text to decode after; default: English for the trained model, random token ids for others.",
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 800,
    temperature: Annotated[
        float, typer.Option(min=0, help="At which they are drawn; at 0 a small model repeats itself.")
    ] = 0.7,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    out: Annotated[Path, typer.Option(file_okay=False, help="Directory for the traces.")] = Path("bench-traces"),
) -> None:
    """Record what a model selects, as traces for the eviction benchmark."""
    where = use_device(device)
    if prompt is None and checkpoint == CHECKPOINT:
        try:
            ids = passage_ids(random.Random(0), prompt_tokens)
        except ValueError as error:
            raise StartupError(f"--prompt-tokens {prompt_tokens}: {error}") from error
    elif prompt is None:
        vocab = read_spec(checkpoint, resolve_dtype(checkpoint, "auto"), None).vocab_size
        ids = np.random.default_rng(0).integers(0, vocab, prompt_tokens).tolist()
    else:
        from gateway.tokenizer import CheckpointTokenizer

        try:
            text = prompt.read_text()
        except UnicodeDecodeError as error:
            raise StartupError(f"--prompt {prompt}: {error}") from error
        ids = CheckpointTokenizer(str(checkpoint)).encode(text, special_tokens=True)[:prompt_tokens]
        if not ids:
            raise StartupError(f"--prompt {prompt}: expected a text, found no token")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartupError(f"--out {out}: {error.strerror}") from error
    traces = record(checkpoint, ids, steps, where, Sampling(temperature=temperature))
    for layer, positions in traces.items():
        np.savez_compressed(
            out / f"layer-{layer}.npz", positions=positions.numpy().astype(np.int32), first=len(ids) - 1
        )
    Console().print(f"{len(traces)} traces of {steps} steps after {len(ids)} tokens in {out}", highlight=False)


if __name__ == "__main__":
    run(main)
