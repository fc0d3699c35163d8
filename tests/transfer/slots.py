"""Where slots lie in memory, for tests that are the sender of a checksum."""

from transfer.checksum import Range, SlotRuns, digest
from transfer.messages import BufferInfo
from transfer.planner import Int64s


def slot_ranges(buffers: BufferInfo, buffer: int, slots: Int64s) -> list[Range]:
    """The memory of these slots of a buffer in their order, neighbours joined."""
    return SlotRuns(slots).ranges(buffers, buffer, 0, len(slots))


def slot_digest(buffers: BufferInfo, buffer: int, slots: Int64s) -> int:
    return digest(slot_ranges(buffers, buffer, slots))
