"""Loads a Hugging Face checkpoint of a sparse-attention model, and chooses what computes its attention."""

import importlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import structlog
import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from base.errors import StartupError
from base.memory import available_host_bytes, human
from kernels.attention import AttentionBackend, triton_backend
from kernels.operands import BlockFp8
from kernels.ops import fp8_unavailable_reason, triton_unavailable_reason
from kvcache.choices import KVCacheDtype
from model.checkpoint import fingerprint, has_weight, read_json, weight_files
from model.config import DTYPES, ModelSpec, read_config
from model.network import Network
from model.shard import NO_EXCHANGE, SINGLE_RANK, Exchange, Shard
from model.sparse_model import SparseModel
from model.stored_weights import SCALES, StoredTensor, StoredWeights, find_tensors
from model.weights import RandomWeights

log = structlog.get_logger(__name__)

LoadFormat = Literal["auto", "dummy"]
"""Where weights come from: the checkpoint's files, or random numbers."""
Quantization = Literal["auto", "fp8"]
"""auto: as the checkpoint is. fp8: weights that are in another type become block-fp8 while they are loaded."""

BackendName = Literal["auto", "triton", "torch"]
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")
_OF_ALL_LAYERS = ("embed_tokens", "shared_head.head")
"""Weights that the multi-token prediction layer of a checkpoint may repeat."""
_NAMED = 3
"""Weights that a message names."""
_LEAST_LOGGED = 1 << 30
"""Bytes. Less is loaded before anybody reads a line about it."""


def resolve_dtype(path: Path, name: str) -> torch.dtype:
    """The dtype called `name`; `auto` is the one that the checkpoint names in its configuration.

    Raises StartupError for dtypes that are not served.
    """
    if name == "auto":
        config = read_json(path / "config.json")
        name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if name not in DTYPES:
        raise StartupError(f"dtype {name} is not served; give --dtype {' or '.join(DTYPES)}")
    return DTYPES[name]


def read_spec(
    path: Path,
    dtype: torch.dtype,
    context_length: int | None = None,
    load_format: LoadFormat = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    drafts: bool = False,
) -> ModelSpec:
    """Read a checkpoint's shapes and identity from its configuration and weight headers, without its weights.

    `context_length` defaults to all that the model was made for. With load_format `dummy` there need not be weights.
    drafts: with the draft layer, if the checkpoint has one.
    Raises StartupError where the directory is not a complete checkpoint of a supported model, or its KV cannot be
    stored as `kv_cache_dtype`.
    """
    config = read_config(path)
    longest = config.max_position_embeddings
    if context_length is None:
        context_length = longest
    if not 0 < context_length <= longest:
        raise StartupError(
            f"the context length must be between 1 and the model's max_position_embeddings, "
            f"{longest}, not {context_length}"
        )
    files = weight_files(path) if load_format == "auto" else []
    identity = fingerprint(read_json(path / "config.json"), files)
    drafts = drafts and has_draft_layer(path, load_format)
    spec = config.spec(dtype, context_length, identity, kv_cache_dtype, drafts)
    try:
        _ = spec.kv_format
    except ValueError as error:
        raise StartupError(f"{path}: --kv-cache-dtype {kv_cache_dtype}: {error}") from error
    return spec


def has_draft_layer(path: Path, load_format: LoadFormat = "auto") -> bool:
    """Whether a checkpoint has a multi-token prediction layer. Copies are published whose configuration names one, and
    which lack its weights. Raises StartupError as `read_spec`."""
    config = read_config(path)
    name = f"model.layers.{len(config.layers)}.eh_proj.weight"
    return config.draft_layers > 0 and (load_format == "dummy" or has_weight(path, name))


def load_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    context_length: int | None = None,
    backend: AttentionBackend | None = None,
    load_format: LoadFormat = "auto",
    shard: Shard = SINGLE_RANK,
    quantization: Quantization = "auto",
    kv_cache_dtype: KVCacheDtype = "auto",
    exchange: Exchange = NO_EXCHANGE,
    drafts: bool = False,
    planned_for: Callable[[int], object] = lambda num_bytes: None,
) -> SparseModel:
    """Load a checkpoint's weights, converted to `dtype`, onto a device. Never reaches the network.

    Weights in block-fp8 stay as they are where the device computes with them; else they are dequantised. Weights pass
    through main memory in pieces, half a gigabyte of them at most at a time.

    `backend` computes attention, on KV of `kv_cache_dtype`; by default torch does. With load_format `dummy` the device
    generates random weights instead, the same on every device of a kind, as in SGLang and vLLM. `shard`: which experts
    to load, where `exchange` connects the processes that have a part each. drafts: with the draft layer, if the
    checkpoint has one. planned_for: called with the bytes that the weights take on the device, before any is read.

    Raises StartupError for what `read_spec` refuses, where weights are missing or have other shapes, and where they do
    not fit the device.
    """
    spec = read_spec(path, dtype, context_length, load_format, kv_cache_dtype, drafts)
    drafts, config = spec.draft_layer is not None, read_config(path)
    reason = fp8_unavailable_reason(device, dtype)
    if quantization == "fp8" and reason:
        raise StartupError(f"--quantization fp8: {reason}")
    fp8 = config.quantization or (BlockFp8() if quantization == "fp8" else None)
    keeps = None if reason else fp8
    if fp8 and reason:
        log.info("fp8 weights are dequantised", dtype=str(dtype).removeprefix("torch."), reason=reason)
    stored = {} if load_format == "dummy" else find_tensors(weight_files(path))

    def weights(where: torch.device) -> RandomWeights | StoredWeights:
        if load_format == "dummy":
            return RandomWeights(where, dtype, keeps)
        return StoredWeights(stored, where, dtype, keeps, quantises=quantization == "fp8")

    # First without memory, so that nothing is read of what cannot be served.
    planned = weights(torch.device("meta"))
    try:
        Network.load(planned, config, shard, drafts=drafts)
    except ValueError as error:
        raise StartupError(f"{path}: {error}") from error
    if isinstance(planned, StoredWeights):
        _check(path, planned, stored, spec)
    _check_room(path, planned.num_bytes, device)
    planned_for(planned.num_bytes)
    made = weights(device)
    network = Network.load(made, config, shard, exchange, drafts)
    if isinstance(made, StoredWeights):
        with load_progress("loading weights", made.bytes_to_read) as advance:
            made.fill(advance)
    if device.type == "cuda":  # the pools need what loading left in the allocator's cache
        torch.cuda.empty_cache()
    return SparseModel(network, spec, backend or AttentionBackend(spec.kv_format))


def choose_backend(name: BackendName, device: torch.device, spec: ModelSpec) -> AttentionBackend:
    """The backend called `name`; `auto` is triton for bfloat16 on CUDA where it can run, else torch.

    float32 is for reproducing the reference token by token, which takes the order in which torch breaks ties among
    index scores. Raises StartupError for a backend that cannot run this model on this device.
    """
    if name == "torch" or (name == "auto" and not (device.type == "cuda" and spec.dtype == torch.bfloat16)):
        return AttentionBackend(spec.kv_format)
    reason = _triton_reason(device, spec)
    if reason is None:
        return triton_backend(spec.kv_format)
    if name == "triton":
        raise StartupError(f"--attention-backend triton {reason}; give --attention-backend torch or auto")
    log.warning("attention is computed by torch, which is slower", why=f"triton {reason}")
    return AttentionBackend(spec.kv_format)


def _triton_reason(device: torch.device, spec: ModelSpec) -> str | None:
    """Why the Triton backend cannot compute this model on this device; None if it can."""
    if device.type != "cuda":
        return f"runs on CUDA devices, not on {device}"
    if reason := triton_unavailable_reason():
        return reason
    try:
        importlib.import_module("kernels.top_k")
    except ImportError as error:
        return f"needs {error.name}, which compiles its top-k kernel: install hisparse-pd[kernels]"
    if reason := spec.kv_format.triton_refusal(spec.dtype):
        return reason
    # What the registers and the shared memory of one program of the Triton kernels hold.
    for what, size, limit in (
        ("kv_lora_rank", spec.latent_dim, 512),
        ("qk_rope_head_dim", spec.item_dim - spec.latent_dim, 64),
        ("index_head_dim", spec.index_dim, 128),
    ):
        if size > limit:
            return f"takes a {what} of at most {limit}, not {size}"
    return None


def _check(path: Path, planned: StoredWeights, stored: Mapping[str, StoredTensor], spec: ModelSpec) -> None:
    """Raise StartupError where the network wants what is not stored. Log what is stored and not wanted."""
    if planned.missing:
        raise StartupError(f"{path} lacks {_some(planned.missing)}")
    if planned.misshapen:
        raise StartupError(f"{path} has weights of other shapes: {'; '.join(planned.misshapen[:_NAMED])}")
    alone = [name for name in stored if name.endswith(SCALES) and name.removesuffix(SCALES) not in stored]
    if alone:
        raise StartupError(f"{path} has scales without the weights that they belong to: {_some(alone)}")
    repeated = {f"model.layers.{spec.draft_layer}.{name}.weight" for name in _OF_ALL_LAYERS}
    left = [name for name in stored if name not in planned.used and name not in repeated]
    skipped = [name for name in left if (layer := _LAYER.match(name)) and int(layer[1]) >= spec.num_layers]
    if skipped:
        log.info("multi-token prediction layers are not loaded", weights=len(skipped))
    unknown = [name for name in set(left).difference(skipped) if not _EXPERT.search(name)]
    if unknown:
        log.warning("the checkpoint has weights that this network does not know", weights=_some(sorted(unknown)))


def _check_room(path: Path, num_bytes: int, device: torch.device) -> None:
    """Raise StartupError if weights of so many bytes do not fit the device."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes()
    if num_bytes > free and device.type != "meta":
        raise StartupError(f"the weights of {path} take {human(num_bytes)}, but {device} has {human(free)} free")


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NAMED else ""
    return f"{len(names)} weights: {', '.join(sorted(names)[:_NAMED])}{more}"


@contextmanager
def load_progress(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show how far reading is: a bar on a terminal, a line for every tenth in a log, and one at the end.

    num_bytes: that will be read. Yields what to call, in one thread, with each number of bytes that has been read.
    """
    begun, done, bar = time.monotonic(), 0, None
    if sys.stderr.isatty():
        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        bar.add_task(what, total=num_bytes)
        bar.start()

    def advance(count: int) -> None:
        nonlocal done
        before, done = done, done + count
        tenths = 10 * done // max(1, num_bytes)
        if bar is not None:
            bar.advance(bar.task_ids[0], count)
        elif 10 * before // max(1, num_bytes) < tenths < 10 and num_bytes >= _LEAST_LOGGED:
            log.info(what, done=f"{10 * tenths}%", of=human(num_bytes))

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()
        seconds = time.monotonic() - begun
        log.info(
            f"{what}: done" if done == num_bytes else f"{what}: given up",
            read=human(done),
            seconds=round(seconds, 1),
            rate=f"{human(int(done / max(seconds, 1e-6)))}/s",
        )
