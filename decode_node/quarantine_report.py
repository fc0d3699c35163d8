"""What a decode node tells operators of its quarantine. Apart from the node, so that the command starts at once."""

from typing import Literal

from pydantic import BaseModel

DANGER = "evicting a process that still writes corrupts the memory of other requests"


class QuarantinedReservation(BaseModel):
    """Slots of an abandoned attempt, and a process that may still be at them: a prefill node, or one of its ranks.

    Slots that several processes may be writing to are listed for each of them.
    """

    request_id: str
    epoch: int
    slots: int
    quarantined_s: float
    writer: str
    """The process's control address."""
    boot_id: str
    access: Literal["writes", "reads"] = "writes"
    """reads: slots of a cached prefix, which are kept while that process reads them."""
    last_heard_s: float | None
    """Seconds since that process was last heard; None if that is too long ago to be known."""
    free_in_s: float | None
    """Seconds until the slots are free of this process, if it is proved dead or evicted; None otherwise."""


class QuarantineList(BaseModel):
    reservations: list[QuarantinedReservation]


class Eviction(BaseModel):
    """What an eviction frees, after the grace for writes that the network still carries; what was read, at once.

    also_written_by, also_read_by: boot ids of other ranks that may still be writing to some of it, or reading it, which
    is not free before.
    """

    boot_id: str
    reservations: int
    slots: int
    free_in_s: float
    also_written_by: list[str] = []
    also_read_by: list[str] = []
    warning: str = DANGER
