"""Where the tokens of a case lie in both pools, and the descriptors that a method without a planner would post."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.transfer.cases import Case, Fragmentation
from transfer.memory import BufferInfo
from transfer.planner import Descriptors, Int64s, expand_pages

PIECE_BYTES = 1 << 20
"""Of a descriptor of a large write."""


@dataclass(frozen=True)
class Request:
    """Position p lies in source item `items[p]` and goes to slot `slots[p]`; `pages` name the items' pages."""

    pages: Int64s
    items: Int64s
    slots: Int64s


@dataclass(frozen=True)
class Placement:
    """All requests of a case. page_size: of the source, in tokens."""

    page_size: int
    requests: tuple[Request, ...]

    @property
    def items(self) -> Int64s:
        return np.concatenate([request.items for request in self.requests])

    @property
    def slots(self) -> Int64s:
        return np.concatenate([request.slots for request in self.requests])


def place(case: Case, seed: int = 0) -> Placement:
    """Scatter the requests of a case over pools of `case.rows` items, as the case wants it; deterministic."""
    rng = np.random.default_rng(seed)
    page_size = 1 if case.source is Fragmentation.ITEMS else case.page_size
    pages = _pieces(case, case.source, page_size, rng)
    granule = 1 if case.destination is Fragmentation.ITEMS else case.page_size
    granules = _pieces(case, case.destination, granule, rng)
    return Placement(
        page_size,
        tuple(
            Request(own, expand_pages(own, page_size, 0, case.tokens), expand_pages(to, granule, 0, case.tokens))
            for own, to in zip(pages, granules, strict=True)
        ),
    )


def in_one_piece(case: Case) -> Placement:
    """The same bytes with nothing scattered: what large writes are measured with."""
    everything = np.arange(case.concurrency * case.tokens, dtype=np.int64)
    return Placement(1, (Request(everything, everything, everything),))


def _pieces(case: Case, kind: Fragmentation, size: int, rng: np.random.Generator) -> list[Int64s]:
    """For each request the numbers of its pieces of `size` tokens. Scattered ones leave every other piece unused."""
    each = -(-case.tokens // size)
    numbers = np.arange(each * case.concurrency, dtype=np.int64)
    if kind is not Fragmentation.CONTIGUOUS:
        numbers = 2 * rng.permutation(numbers)
    return np.split(numbers, case.concurrency)


def per_token(placement: Placement, source: BufferInfo, target: BufferInfo) -> Descriptors:
    """One descriptor per token and layer."""
    return _over_layers(placement.items, placement.slots, np.ones(len(placement.items), np.int64), source, target)


def per_page(placement: Placement, page_size: int, source: BufferInfo, target: BufferInfo) -> Descriptors:
    """One descriptor per page of `page_size` tokens and layer, cut further where either side does not continue."""
    columns = []
    for request in placement.requests:
        new = np.ones(len(request.items), dtype=bool)
        new[1:] = (np.diff(request.items) != 1) | (np.diff(request.slots) != 1)
        new[::page_size] = True
        first = np.flatnonzero(new)
        columns.append((request.items[first], request.slots[first], np.diff(np.append(first, len(new)))))
    items, slots, lengths = (np.concatenate(column) for column in zip(*columns, strict=True))
    return _over_layers(items, slots, lengths, source, target)


def coalesced(placement: Placement, source: BufferInfo, target: BufferInfo) -> Descriptors:
    """As few descriptors as the places allow without packing: cut only where either side does not continue."""
    return per_page(placement, max(len(request.items) for request in placement.requests), source, target)


def pieces(num_items: int, source: BufferInfo, target: BufferInfo) -> Descriptors:
    """The first `num_items` items of every layer as pieces of PIECE_BYTES."""
    layers = []
    for source_base, target_base, item_bytes in zip(source.ptrs, target.ptrs, source.item_lengths, strict=True):
        offsets = np.arange(0, num_items * item_bytes, PIECE_BYTES, dtype=np.int64)
        lengths = np.minimum(PIECE_BYTES, num_items * item_bytes - offsets)
        layers.append(Descriptors(source_base + offsets, target_base + offsets, lengths))
    return _joined(layers)


def _over_layers(items: Int64s, slots: Int64s, lengths: Int64s, source: BufferInfo, target: BufferInfo) -> Descriptors:
    """The same pieces, in items, at every layer's addresses."""
    return _joined(
        [
            Descriptors(source_base + items * item_bytes, target_base + slots * item_bytes, lengths * item_bytes)
            for source_base, target_base, item_bytes in zip(source.ptrs, target.ptrs, source.item_lengths, strict=True)
        ]
    )


def _joined(layers: Sequence[Descriptors]) -> Descriptors:
    return Descriptors(*(np.concatenate(column) for column in zip(*layers, strict=True)))
