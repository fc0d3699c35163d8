"""Where each decode process may have KV written: to the pools that it offered first, and nowhere else."""

from collections import OrderedDict

from control.messages import Destination, Peer

_REMEMBERED = 4096


class Destinations:
    """The pools that decode processes named in their first requests.

    A process keeps its pools, and the ways to reach them, as long as it lives. So nothing is written for a message in
    its name that names others.
    """

    def __init__(self, limit: int = _REMEMBERED) -> None:
        """limit: processes that are remembered, the last ones."""
        self._limit = limit
        self._of_boot: OrderedDict[str, Destination] = OrderedDict()

    def contradiction(self, decode: Peer, named: Destination) -> str | None:
        """How a destination differs from the one that the process offered first, or None. The first call counts."""
        known = self._of_boot.setdefault(decode.boot_id, named)
        self._of_boot.move_to_end(decode.boot_id)
        if len(self._of_boot) > self._limit:
            self._of_boot.popitem(last=False)
        differing = [name for name in Destination.model_fields if getattr(known, name) != getattr(named, name)]
        if not differing:
            return None
        return f"{decode.address} offered another destination before: {', '.join(differing)} changed"
