"""Where slots lie in memory, for tests that are the sender of a checksum."""

from control.messages import BufferInfo
from transfer.checksum import digest, item_ranges
from transfer.planner import Int64s


def slot_digest(buffers: BufferInfo, buffer: int, slots: Int64s) -> int:
    return digest(item_ranges(buffers, buffer, slots))
