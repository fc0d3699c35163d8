"""What tests of transfer share: one write over a channel, and the digest of slots."""

from collections.abc import Callable, Iterable

import numpy as np

from transfer.checksum import digest, item_ranges
from transfer.memory import BufferInfo
from transfer.planner import Descriptors, Int64s
from transfer.writer import Channel, Outcome, Pipeline, TransferError, Write


def write(channel: Channel, batches: Iterable[Descriptors], go_on: Callable[[], bool] = lambda: True) -> bool:
    """Whether all of it was posted. Raises TransferError if some of it failed."""
    pipeline = Pipeline(channel)
    ended: list[bool] = []
    write = Write(on_end=lambda: ended.append(True), go_on=go_on)
    complete = all(pipeline.post(write, batch) for batch in batches)
    pipeline.close(write)
    pipeline.drain()
    assert ended == [True]
    if write.outcome is not Outcome.LANDED:
        raise TransferError(write.outcome.name)
    channel.check()
    return complete


def slot_digest(buffers: BufferInfo, buffer: int, slots: Int64s) -> int:
    """The digest of these slots, as a sender computes it."""
    return digest(item_ranges(buffers, buffer, slots))


def descriptors(source: int, destination: int, pieces: list[tuple[int, int, int]]) -> Descriptors:
    """pieces: (offset from the source, offset from the destination, length)."""
    columns = np.array(pieces, dtype=np.int64).T
    return Descriptors(source + columns[0], destination + columns[1], columns[2])
