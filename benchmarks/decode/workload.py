"""A model with published widths and random weights, requests that it decodes, and what it is made to select."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch
from transformers import AutoConfig

from base.errors import StartupError
from benchmarks.decode.resident import resident_tiers
from benchmarks.wrapped_backend import WrappedBackend
from hisparse.config import HiSparseConfig
from hisparse.sizing import describe, plan_sizes, step_window
from hisparse.tiers import build_tiers, largest_buffer
from kernels.attention import AttentionBackend
from kernels.fp8 import quantise_activations
from kernels.operands import IndexQueries, PagedKeys, RouterConfig
from kvcache.choices import KVCacheDtype
from kvcache.extents import HostSlots
from model.config import ModelSpec, NetworkConfig, network_config
from model.families import ShapeName, published_config
from model.roofline import RankModel
from model.shard import NO_EXCHANGE, Exchange, RoutedTokens

GIB = 2**30
_INDEX_PAGE = 64
_FILL_ROWS = 1 << 14


def _limit(context: int) -> int:
    """Tokens that a request may have: as many more as rows are made resident for, and some hundred steps."""
    return context + context // 256 + 512


def fill_pool(kv: torch.Tensor, index_keys: torch.Tensor, spec: ModelSpec, device: torch.device) -> None:
    """Random items and index keys in all rows of each layer; they are made on the device."""
    kv_format = spec.kv_format
    items = kv_format.encode_items(torch.randn(_FILL_ROWS, spec.item_dim, device=device, dtype=spec.dtype))
    keys = kv_format.encode_index_keys(torch.randn(_FILL_ROWS, spec.index_dim, device=device, dtype=spec.dtype))
    for layers, stored in ((kv, items), (index_keys, keys)):
        for layer in layers:
            for rows in layer.split(_FILL_ROWS):
                rows.copy_(stored[: len(rows)])


class Strangers(Exchange):
    """Stands for a group whose other processes have as many tokens. Nothing is exchanged.

    Their hidden states are random; so are the experts that they choose, where a process gathers routed tokens. idle:
    the tokens of the others are padding, and choose no experts there.
    """

    def __init__(self, of: int, hidden_size: int, router: RouterConfig, idle: bool = False) -> None:
        self._of = of
        self._idle = idle
        self._hidden_size = hidden_size
        self._router = router
        self._all: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        count, key = len(rows), (len(rows), rows.dtype)
        if key not in self._all:
            generator = torch.Generator(rows.device).manual_seed(1)
            self._all[key] = torch.cat([self._others(rows, generator) for _ in range(self._of)])
        self._all[key][:count] = rows
        return self._all[key]

    def _others(self, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """What another process might bring: hidden states, or the rows of RoutedTokens, which are bytes."""
        count, width, device = len(rows), self._hidden_size, rows.device
        if rows.dtype != torch.uint8:
            return torch.empty_like(rows).normal_(generator=generator)
        tokens = RoutedTokens.empty(count, width, self._router.top_k, device)
        hidden = torch.empty(count, width, dtype=torch.bfloat16, device=device).normal_(generator=generator)
        for room, made in zip(tokens.quantised, quantise_activations(hidden, power_of_two=True), strict=True):
            room.copy_(made)
        order = torch.rand(count, self._router.experts, device=device, generator=generator)
        tokens.ids.copy_(order.topk(self._router.top_k).indices)
        if self._idle:
            tokens.ids.fill_(-1)
        tokens.weights.fill_(1 / self._router.top_k)
        return tokens.rows

    def reduce(self, parts: torch.Tensor) -> torch.Tensor:
        return parts[: len(parts) // self._of]


class ModelFlags(Protocol):
    """The flags of a benchmark that choose a model. context: tokens of the longest request."""

    @property
    def shape(self) -> ShapeName: ...
    @property
    def layers(self) -> int | None: ...
    @property
    def rank_of(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def quantization(self) -> str: ...
    @property
    def kv_cache_dtype(self) -> KVCacheDtype: ...


def _as_it_is(exchange: Exchange) -> Exchange:
    return exchange


def build_model(
    config: ModelFlags,
    device: torch.device,
    wrapped: Callable[[Exchange], Exchange] = _as_it_is,
    drafts: bool = False,
    idle: bool = False,
) -> RankModel:
    """wrapped: makes the exchange that mixtures of experts use, of the one that stands for the group. drafts: with the
    draft layer. idle: see Strangers.

    Raises ValueError for layers or ranks that the shape does not have.
    """
    described = AutoConfig.for_model(**published_config(config.shape, config.layers))
    return model_of(network_config(described), config, device, wrapped, drafts, idle)


def model_of(
    sizes: NetworkConfig,
    config: ModelFlags,
    device: torch.device,
    wrapped: Callable[[Exchange], Exchange] = _as_it_is,
    drafts: bool = False,
    idle: bool = False,
) -> RankModel:
    """The same, of these sizes."""
    group = config.rank_of > 1
    exchange = Strangers(config.rank_of, sizes.hidden_size, sizes.router, idle) if group else NO_EXCHANGE
    return RankModel.build(
        sizes,
        ranks=config.rank_of,
        fp8=config.quantization == "fp8",
        context_length=_limit(config.context),
        kv_cache_dtype=config.kv_cache_dtype,
        device=device,
        exchange=wrapped(exchange),
        drafts=drafts,
    )


class GivenSelection(WrappedBackend):
    """Selects as another backend does, for what it costs, and then answers what it was given.

    Hidden states of random weights drift as no text does, and so would what they select: the miss rate would say
    nothing. `positions`, int64 [index_layers, batch * width, topk] on the device, are what each is told to have
    selected; replays of a recorded step read what was last written to it. The draft layer selects what is there for the
    last token of each request.
    """

    def __init__(self, inner: AttentionBackend, spec: ModelSpec, requests: "Requests", width: int = 1) -> None:
        super().__init__(inner)
        self._width = width
        pool = requests.coordinator.device
        self._keys_stride = pool.index_keys.stride(0)
        shape = (spec.num_index_layers, len(requests.ids) * width, spec.index_topk)
        self.positions = torch.zeros(shape, dtype=torch.int64, device=pool.device)

    def select_for_decode(self, index: IndexQueries, pages: PagedKeys, topk: int) -> torch.Tensor:
        queries, k = super().select_for_decode(index, pages, topk).shape
        positions = self.positions[pages.keys.storage_offset() // self._keys_stride]  # its keys tell the index layer
        last = positions[self._width - 1 :: self._width]
        given = last if queries == len(last) else positions
        return given[:queries, :k].contiguous()


class Requests:
    """A batch of running requests of `context` tokens each, admitted from a host pool of random items and keys.

    device_buffer_size: hot slots of each; with at least the context length of the spec nothing is ever missed, and
    admission brings all KV into HBM. None: the same at any context length and without a resolve; what layers select
    must be slots (`to_slots`). resident_rows: whether there are hot slots for all tokens of all requests. pool_bytes:
    of HBM, for hot slots, index keys and tables, of which a node makes the largest buffers and resident requests, or
    that all KV takes at most. most_running: requests that these pools are for, if there are more than the batch. Raises
    StartupError if they do not hold these buffers.
    """

    def __init__(
        self,
        spec: ModelSpec,
        context: int,
        batch: int,
        device_buffer_size: int | None,
        device: torch.device,
        max_drafts: int = 0,
        resident_rows: bool = False,
        pool_bytes: int | None = None,
        most_running: int = 0,
    ) -> None:
        self._context = context
        self.ids = [f"r{number}" for number in range(batch)]
        host_slots, window = batch * _limit(context) + 1, step_window(max_drafts)
        most_running = max(batch, most_running)
        if device_buffer_size is None:
            self.coordinator = resident_tiers(
                spec.kv_layout,
                batch=batch,
                context_length=spec.context_length,
                num_host_slots=host_slots,
                index_page_size=_INDEX_PAGE,
                window=window,
                device=device,
                pool_bytes=pool_bytes,
            )
        else:
            tiers = HiSparseConfig(
                device_buffer_size=device_buffer_size,
                top_k=spec.index_topk,
                host_to_device_ratio=None,
                host_pool_gib=(most_running * _limit(context) + 1) * spec.kv_layout.token_bytes / GIB,
                resident_rows=resident_rows or pool_bytes is not None,
                larger_buffers=pool_bytes is not None,
            )
            sizes = plan_sizes(
                tiers,
                spec.kv_layout,
                max_running_requests=most_running,
                context_length=spec.context_length,
                index_page_size=_INDEX_PAGE,
                available_host_bytes=2**40,
                available_device_bytes=pool_bytes or 2**40,
                window=window,
                fill_memory=True,
                largest_buffer=largest_buffer(tiers, spec.context_length, max_drafts, device),
            )
            if not sizes.has_all_buffers:
                raise StartupError(f"{most_running} requests do not fit: {'; '.join(describe(sizes))}")
            self.coordinator = build_tiers(replace(sizes, num_host_slots=host_slots), device)
        fill_pool(self.coordinator.host.kv, self.coordinator.host.index_keys, spec, device)
        for request_id in self.ids:
            self._admit(request_id, self.coordinator.host.allocate(context))

    @property
    def newest(self) -> int:
        """The position of the token that is computed next of each request."""
        return self.coordinator.num_tokens(self.ids[0])

    def restart(self) -> None:
        """Take each request back to its `context` tokens, as after admission."""
        held = [self.coordinator.retract_request(request_id) for request_id in self.ids]
        for request_id, slots in zip(self.ids, held, strict=True):
            self._admit(request_id, slots)

    @property
    def are_filled(self) -> bool:
        """Whether no row is being made resident. Before the first step, none is yet."""
        return self.coordinator.residents.filler.is_idle

    def to_slots(self, selected: torch.Tensor) -> None:
        """Replace positions by device slots: int64 [index_layers, batch, queries, k], where all KV is in HBM."""
        rows = [self.coordinator.row(request_id) for request_id in self.ids]
        row = torch.tensor(rows, device=selected.device)[:, None, None]
        for layer in selected:
            layer.copy_(self.coordinator.device.hot_slots(row, layer))

    def make_room(self) -> None:
        """For the next token of each request. Raises RuntimeError if there is none."""
        if short_of := self.coordinator.append_tokens(self.ids):
            raise RuntimeError(f"the pools have no room for a token of {len(short_of)} requests")

    def _admit(self, request_id: str, slots: HostSlots | None) -> None:
        if slots is None or not self.coordinator.admit_request_direct(request_id, slots, self._context):
            raise RuntimeError(f"the pools have no room for request {request_id} of {len(self.ids)}")

    def close(self) -> None:
        """Finish the requests and unpin the host pool. Raises what the device found wrong in the meantime."""
        for request_id in self.ids:
            self.coordinator.release_host(self.coordinator.retract_request(request_id))
        if not self.coordinator.is_idle():
            raise RuntimeError("finished requests left something behind")
        if violations := self.coordinator.counters().violations:
            raise RuntimeError(f"{violations} swap-in violations: what was timed is no decode step")
        self.coordinator.close()
