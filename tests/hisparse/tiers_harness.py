"""Small KV tiers and a model that writes recognisable bytes, for the coordinator's tests."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from hisparse.config import HiSparseConfig
from hisparse.coordinator import HiSparseCoordinator, StepPlaces
from hisparse.device_pool import DeviceKVPool
from hisparse.sizing import Sizes
from hisparse.staging import CopyStream
from hisparse.step import DecodeStep
from hisparse.swap_in import Span, StagedKV
from hisparse.tiers import build_tiers
from kvcache.extents import HostSlots
from kvcache.format import DenseFormat
from kvcache.host_pool import HostKVPool
from kvcache.layout import KVLayout

FORMAT = DenseFormat(torch.float32, item_dim=3, index_dim=2)
LAYOUT = KVLayout((0, 1, 1, 1, 2), FORMAT.item_bytes, FORMAT.index_key_bytes)
TOP_K = 4
HOT = 6
PAGE = 5
"""A slab has two hot slots, or one page."""
CONTEXT = 40


def item(seed: int, layer: int, position: int) -> list[float]:
    """The KV item of a token: no two tokens or layers share one."""
    return [float(seed), float(layer), float(position)]


def index_key(seed: int, index_layer: int, position: int) -> list[float]:
    return [float(seed * 100 + index_layer), float(position)]


@dataclass
class Tiers:
    """A coordinator with its pools. `seeds` names the sequence that each request computes, `tokens` its length."""

    coordinator: HiSparseCoordinator
    host: HostKVPool
    device: DeviceKVPool
    stream: CopyStream
    seeds: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    staged_slots: dict[str, HostSlots] = field(default_factory=dict)

    def host_slots(self, num_tokens: int) -> HostSlots:
        slots = self.host.allocate(num_tokens)
        assert slots is not None
        return slots

    def host_prompt(self, seed: int, num_tokens: int) -> HostSlots | None:
        """Host slots that hold a prompt, as a transfer would leave them."""
        slots = self.host.allocate(num_tokens)
        if slots is not None:
            at = torch.from_numpy(slots.slots())
            for layer in range(LAYOUT.num_layers):
                self.host.kv[layer][at] = items([item(seed, layer, p) for p in range(num_tokens)])
            for layer in range(LAYOUT.num_index_layers):
                self.host.index_keys[layer][at] = keys([index_key(seed, layer, p) for p in range(num_tokens)])
        return slots

    def admit(self, request_id: str, seed: int, num_tokens: int, limit: int | None = None) -> bool:
        """Direct admission of a new prompt; gives the host slots back if it is refused."""
        slots = self.host_prompt(seed, num_tokens)
        if slots is None:
            return False
        if not self.coordinator.admit_request_direct(request_id, slots, num_tokens, limit):
            self.host.release(slots)
            return False
        self.seeds[request_id] = seed
        self.tokens[request_id] = num_tokens
        return True

    def reclaim(self) -> bool:
        """Slots are short: have a resident row give some back."""
        return self.coordinator.residents.reclaim(self.coordinator._begun)

    def step(
        self,
        request_ids: Sequence[str],
        rng: random.Random,
        break_at_layer: int | None = None,
        selected: list[int] | None = None,
    ) -> bool:
        """Decode one token for each request. With `break_at_layer` the model fails before that layer's swap-in.

        selected: the positions that every layer selects; at random if None.
        """
        step, places = self._begin(request_ids)
        on = self.device.device
        positions = torch.empty(0)
        newest = [self.tokens[request_id] - 1 for request_id in request_ids]
        for layer, index_layer in enumerate(LAYOUT.index_layer_of):
            seeds = [self.seeds[request_id] for request_id in request_ids]
            new = [item(s, layer, n) for s, n in zip(seeds, newest, strict=True)]
            step.append(layer, items(new).to(on))
            if layer == 0 or LAYOUT.index_layer_of[layer - 1] != index_layer:
                new = [index_key(s, index_layer, n) for s, n in zip(seeds, newest, strict=True)]
                step.append_index_keys(index_layer, keys(new).to(on))
                self.check_index_pages(step, index_layer, seeds, newest)
                positions = torch.tensor([selected or select(rng, n) for n in newest], device=on)
            if layer == break_at_layer:
                self.coordinator.step_over(places, dict.fromkeys(request_ids, 1))
                return False
            slots = step.swap_in(layer, positions)
            for b, (seed, row) in enumerate(zip(seeds, positions.tolist(), strict=True)):
                for slot, position in zip(slots[b].tolist(), row, strict=True):
                    if position < 0:
                        assert slot == -1
                    else:
                        assert FORMAT.items(step.kv(layer)[slot]).tolist() == item(seed, layer, position)
        step.finish()
        step.verify()
        self.coordinator.step_over(places, dict.fromkeys(request_ids, 1))
        self.coordinator.fill_rows()
        return True

    def begin(self, request_ids: Sequence[str]) -> DecodeStep:
        """Begin a step of which the device computes nothing but what the test asks for."""
        step, places = self._begin(request_ids)
        self.coordinator.step_over(places, dict.fromkeys(request_ids, 1))
        return step

    def _begin(self, request_ids: Sequence[str]) -> tuple[DecodeStep, StepPlaces]:
        assert not self.coordinator.append_tokens(request_ids)
        places = self.coordinator.begin_step(request_ids)
        newest = torch.tensor([self.tokens[request_id] for request_id in request_ids], device=self.device.device)
        assert places.longest == int(newest.max()) + 1
        for request_id in request_ids:
            self.tokens[request_id] += 1
        rows = torch.from_numpy(places.rows).to(newest.device)
        own = Span(newest, torch.ones_like(newest), 1)
        return self.coordinator.cache(rows, newest, own, own, places.longest), places

    def check_index_pages(self, step: DecodeStep, index_layer: int, seeds: list[int], newest: list[int]) -> None:
        pages = step.index_pages(index_layer)
        for b, (seed, last) in enumerate(zip(seeds, newest, strict=True)):
            found = FORMAT.index_keys(pages.keys[pages.page_table[b]].flatten(0, 1)[: last + 1])
            assert found.tolist() == [index_key(seed, index_layer, p) for p in range(last + 1)]

    def check_host_copy(self, slots: HostSlots, seed: int, num_tokens: int) -> None:
        """Every token of a sequence is on the host, in all layers, index keys too."""
        at = torch.from_numpy(slots.slots()[:num_tokens])
        for layer in range(LAYOUT.num_layers):
            assert FORMAT.items(self.host.kv[layer][at]).tolist() == [item(seed, layer, p) for p in range(num_tokens)]
        for layer in range(LAYOUT.num_index_layers):
            expected = [index_key(seed, layer, p) for p in range(num_tokens)]
            assert FORMAT.index_keys(self.host.index_keys[layer][at]).tolist() == expected


def items(values: list[list[float]]) -> torch.Tensor:
    """As pools hold them."""
    return FORMAT.encode_items(torch.tensor(values).view(-1, FORMAT.item_dim))


def keys(values: list[list[float]]) -> torch.Tensor:
    """As pools hold them."""
    return FORMAT.encode_index_keys(torch.tensor(values).view(-1, FORMAT.index_dim))


def select(rng: random.Random, newest: int) -> list[int]:
    """A selection as an indexer might make it: mostly recent positions, sometimes fewer than k, sometimes repeated."""
    low = max(0, newest - HOT - 2) if rng.random() < 0.6 else 0
    chosen = [rng.randint(low, newest) for _ in range(TOP_K)]
    if rng.random() < 0.5:
        chosen[0] = newest
    return chosen if rng.random() < 0.8 else [*chosen[:-1], -1]


class Pages:
    """A prompt in device pages of this node, which must be given back exactly once."""

    def __init__(self, seed: int, num_tokens: int) -> None:
        self.released = 0
        rows = torch.randperm(num_tokens)
        kv = torch.zeros(LAYOUT.num_layers, num_tokens, LAYOUT.item_bytes, dtype=torch.uint8)
        index_keys = torch.zeros(LAYOUT.num_index_layers, num_tokens, LAYOUT.index_key_bytes, dtype=torch.uint8)
        for layer in range(LAYOUT.num_layers):
            kv[layer][rows] = items([item(seed, layer, p) for p in range(num_tokens)])
        for layer in range(LAYOUT.num_index_layers):
            index_keys[layer][rows] = keys([index_key(seed, layer, p) for p in range(num_tokens)])
        self.staged = StagedKV(list(kv), list(index_keys), rows, self.release)

    def release(self) -> None:
        self.released += 1


@contextmanager
def tiers(
    num_host_slots: int = 256,
    num_device_slots: int = 64,
    num_index_pages: int = 64,
    max_requests: int = 8,
    on: str = "cpu",
    swap_in_block_size: int | None = None,
    verify: bool = True,
    resident_rows: bool = False,
    window: int = 1,
    shares_slabs: bool = False,  # whether those of index pages may become hot slots, too
) -> Iterator[Tiers]:
    sizes = Sizes(
        config=HiSparseConfig(
            device_buffer_size=HOT,
            top_k=TOP_K,
            swap_in_block_size=swap_in_block_size,
            resident_rows=resident_rows,
        ),
        layout=LAYOUT,
        max_requests=max_requests,
        max_context=CONTEXT,
        index_page_size=PAGE,
        num_host_slots=num_host_slots,
        num_slabs=num_device_slots // 2 + num_index_pages,
        max_device_slots=None if shares_slabs else num_device_slots,
        window=window,
    )
    coordinator = build_tiers(sizes, torch.device(on), verify)
    yield Tiers(coordinator, coordinator.host, coordinator.device, coordinator._copy_stream)
    coordinator.close()
