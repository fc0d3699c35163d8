"""`python -m benchmarks.swap_in.record CHECKPOINT`: which positions a model selects while it decodes.

One file per index layer, as `benchmarks.swap_in.eviction --trace` reads them. The model runs through the KV tiers as it
does in a decode node, with a hot buffer as large as the context; what it selects does not depend on that.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console

from base.errors import StartupError
from benchmarks.program import run
from benchmarks.wrapped_backend import WrappedBackend
from engine.chunked import ChunkedPrefill, PrefillJob
from engine.convert import kv_layout
from engine.decoding import EagerDecoding
from engine.paged_pool import PagedKVPool
from engine.sampling import SamplingParams
from hisparse import HiSparseConfig, HiSparseCoordinator, build_tiers, plan_sizes
from hisparse.swap_in import StagedKV
from model.backends.choice import choose_backend
from model.backends.protocol import AttentionBackend
from model.cache import IndexPages
from model.dtypes import resolve_dtype
from model.indexer import IndexInputs
from model.loader import load_model, read_spec
from model.spec import ModelSpec

_PAGE = 64
_CHUNK = 2048
_PLENTY = 1 << 40
_REQUEST = "recorded"


class RecordingBackend(WrappedBackend):
    """Keeps what was selected for each decoded token."""

    def __init__(self, inner: AttentionBackend) -> None:
        super().__init__(inner)
        self.selected: list[torch.Tensor] = []

    def select_for_decode(self, index: IndexInputs, pages: IndexPages, topk: int) -> torch.Tensor:
        positions = super().select_for_decode(index, pages, topk)
        self.selected.append(positions.cpu())
        return positions


def record(checkpoint: Path, prompt_ids: list[int], steps: int, device: torch.device) -> dict[int, torch.Tensor]:
    """Decode greedily after a prompt. Returns the selected positions, int64 [steps, k], by index layer.

    The newest position of the first step is the one behind the prompt. A step that selects fewer than k positions has
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
    coordinator = _tiers(spec, len(prompt_ids) + steps, device)
    pool = PagedKVPool(kv_layout(spec), -(-len(prompt_ids) // _PAGE), _PAGE, device)
    token = _prefill(ChunkedPrefill(model, pool, _CHUNK), coordinator, prompt_ids)
    decoding = EagerDecoding(model, coordinator)
    for _ in range(steps):
        coordinator.append_tokens([_REQUEST])
        token = int(decoding.step([_REQUEST], [token]).argmax())
    coordinator.request_finished(_REQUEST)
    coordinator.close()
    return _by_layer(backend.selected, spec)


def _tiers(spec: ModelSpec, tokens: int, device: torch.device) -> HiSparseCoordinator:
    sizes = plan_sizes(
        HiSparseConfig(
            device_buffer_size=max(tokens, spec.index_topk),
            top_k=spec.index_topk,
            host_to_device_ratio=1.0,
            host_pool_gib=None,
        ),
        kv_layout(spec),
        max_running_requests=1,
        context_length=tokens,
        index_page_size=_PAGE,
        available_host_bytes=_PLENTY,
        available_device_bytes=_PLENTY,
    )
    return build_tiers(sizes, device)


def _prefill(prefill: ChunkedPrefill[str], coordinator: HiSparseCoordinator, prompt_ids: list[int]) -> int:
    """Compute the prompt, admit it, and return the token after it."""
    device = prefill.pool.kv.device
    job = PrefillJob(_REQUEST, torch.tensor(prompt_ids, device=device), SamplingParams(temperature=0))
    prefill.add(job)
    token = None
    while token is None:
        token = prefill.step()[0].token
    assert job.cache is not None
    slots = coordinator.host.allocate(len(prompt_ids))
    assert slots is not None
    pool = prefill.pool
    staged = StagedKV(list(pool.kv), list(pool.index_keys), job.cache.rows(0, len(prompt_ids)), lambda: None)
    coordinator.admit_request_into_staging(_REQUEST, slots, staged, len(prompt_ids))
    while not coordinator.poll_staging().landed:
        pass
    coordinator.admit_request_direct(_REQUEST, slots, len(prompt_ids))
    return token.token_id


def _by_layer(selected: list[torch.Tensor], spec: ModelSpec) -> dict[int, torch.Tensor]:
    """Selections come layer after layer, step after step."""
    layers = spec.num_index_layers
    k = max(positions.shape[1] for positions in selected)
    rows = [torch.nn.functional.pad(positions[0], (0, k - positions.shape[1]), value=-1) for positions in selected]
    return {layer: torch.stack(rows[layer::layers]) for layer in range(layers)}


def main(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint directory.")],
    prompt: Annotated[Path | None, typer.Option(help="Text to decode after; default: random token ids.")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 4096,
    steps: Annotated[int, typer.Option(min=1, help="Tokens to decode.")] = 800,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Directory for the traces.")] = Path("bench-traces"),
) -> None:
    """Record what a model selects, as traces for the eviction benchmark."""
    if prompt is None:
        vocab = read_spec(checkpoint, resolve_dtype(checkpoint, "auto"), None).vocab_size
        ids = np.random.default_rng(0).integers(0, vocab, prompt_tokens).tolist()
    else:
        from gateway.tokenizer import CheckpointTokenizer

        ids = CheckpointTokenizer(str(checkpoint)).encode(prompt.read_text(), special_tokens=True)[:prompt_tokens]
    traces = record(checkpoint, ids, steps, torch.device(device))
    out.mkdir(parents=True, exist_ok=True)
    for layer, positions in traces.items():
        np.savez_compressed(out / f"layer-{layer}.npz", positions=positions.numpy().astype(np.int32), first=len(ids))
    Console().print(f"{len(traces)} traces of {steps} steps after {len(ids)} tokens in {out}", highlight=False)


if __name__ == "__main__":
    run(main)
