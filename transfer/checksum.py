"""Checksums of transferred bytes, which both sides hash in place.

A checksum covers positions of one buffer in order, however either side scatters them. `sample` finds writes that did
not land, landed elsewhere or came from another request. Only `full` finds every flipped byte.
"""

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from transfer.choices import ChecksumMode
from transfer.memory import BufferInfo, Checksum
from transfer.planner import Int64s

Range = tuple[int, int]
"""Memory as (address, length in bytes)."""

SAMPLE_POSITIONS = 8


@dataclass(frozen=True)
class Mismatch:
    """A checksum that does not match. found: None, with no ranges, if its positions do not exist."""

    checksum: Checksum
    found: int | None = None
    ranges: tuple[Range, ...] = ()


def item_ranges(buffers: BufferInfo, buffer: int, items: Int64s) -> list[Range]:
    """The memory of these items of a buffer, in order, neighbours joined. items: int64 [n]."""
    base, item_bytes = buffers.ptrs[buffer], buffers.item_lengths[buffer]
    begins = np.ones(len(items) + 1, dtype=bool)
    np.not_equal(items[1:], items[:-1] + 1, out=begins[1:-1])
    bounds = begins.nonzero()[0]
    addresses = base + items[bounds[:-1]] * item_bytes
    lengths = (bounds[1:] - bounds[:-1]) * item_bytes
    return list(zip(addresses.tolist(), lengths.tolist(), strict=True))


def sampled(mode: ChecksumMode, start: int, stop: int, buffer: int) -> tuple[int, int] | None:
    """The hashed positions (start, stop) of a piece [start, stop) of a buffer, or None.

    `sample`: at most SAMPLE_POSITIONS consecutive ones, at a pseudo-random place that depends on `start` and `buffer`.
    """
    if mode == "off" or start >= stop:
        return None
    offsets = stop - start - SAMPLE_POSITIONS + 1
    if mode == "full" or offsets <= 1:
        return start, stop
    first = start + xxhash.xxh3_64_intdigest(struct.pack("<QQ", start, buffer)) % offsets
    return first, first + SAMPLE_POSITIONS


def digest(ranges: Iterable[Range]) -> int:
    """xxh3 (64 bits) of the ranges' bytes in order. The memory must stay mapped."""
    hasher = xxhash.xxh3_64()
    for address, length in ranges:
        # Releases the GIL for more than 64 KiB (xxhash before 4.1: always).
        hasher.update((ctypes.c_char * length).from_address(address))
    return hasher.intdigest()


GROUP_POSITIONS = 1024
"""Consecutive positions of one buffer that `digests` hashes together."""


def digests(
    buffers: BufferInfo, slots: Int64s, start: int, go_on: Callable[[], bool] = lambda: True
) -> Iterator[Checksum]:
    """Checksums of all buffers' items in `slots`, int64 [n]. start: position of the first slot.

    go_on: asked before each checksum; False leaves out the rest.
    """
    for buffer in range(len(buffers.ptrs)):
        for first in range(0, len(slots), GROUP_POSITIONS):
            if not go_on():
                return
            group = slots[first : first + GROUP_POSITIONS]
            found = digest(item_ranges(buffers, buffer, group))
            yield Checksum(buffer, start + first, start + first + len(group), found)


def verify(
    checksums: Iterable[Checksum],
    buffers: BufferInfo,
    slots: Int64s,
    num_tokens: int,
    go_on: Callable[[], bool] = lambda: True,
) -> list[Mismatch]:
    """The checksums that do not match, for `num_tokens` positions. Position p lies in slots[p].

    A checksum of a buffer or of positions that do not exist does not match. go_on: see `digests`. Raises ValueError if
    the slots are not within the buffers.
    """
    if num_tokens > len(slots):
        raise ValueError(f"{num_tokens} tokens in {len(slots)} slots")
    if len(slots) and not 0 <= slots.min() <= slots.max() < buffers.num_items:
        raise ValueError(f"slots {slots.min()} to {slots.max()} are not within [0, {buffers.num_items})")
    mismatches = []
    for checksum in checksums:
        if not go_on():
            break
        buffer, start, stop, expected = checksum
        if buffer >= len(buffers.ptrs) or not start < stop <= num_tokens:
            mismatches.append(Mismatch(checksum))
            continue
        ranges = item_ranges(buffers, buffer, slots[start:stop])
        if (found := digest(ranges)) != expected:
            mismatches.append(Mismatch(checksum, found, tuple(ranges)))
    return mismatches
