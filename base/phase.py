"""The phases of a process, and of a group of processes."""

from enum import IntEnum


class Phase(IntEnum):
    """What a process does with requests. No process goes back to an earlier phase."""

    SERVING = 0
    """Takes new requests."""
    DRAINING = 1
    """Takes none, hands over those that have not begun, and finishes the others until the drain timeout."""
    ENDING = 2
    """Gives up those that are left."""
