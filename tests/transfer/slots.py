"""Where slots lie in memory, for tests that are the sender of a checksum."""

from transfer.checksum import digest, item_ranges
from transfer.memory import BufferInfo
from transfer.planner import Int64s


def slot_digest(buffers: BufferInfo, buffer: int, slots: Int64s) -> int:
    return digest(item_ranges(buffers, buffer, slots))
