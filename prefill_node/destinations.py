"""Where decode nodes may have KV written: what each of their processes offered first, and nothing else later."""

from collections import OrderedDict

from control.messages import Destination, Peer

_REMEMBERED = 4096


class Destinations:
    """The pools of decode processes, as their first requests named them.

    A process has the same pools, and the same ways to reach them, as long as it lives. A message that names others in
    its name is wrong, whoever made it: nothing is written for it.
    """

    def __init__(self, limit: int = _REMEMBERED) -> None:
        """limit: processes that are remembered, the last ones."""
        self._limit = limit
        self._of_boot: OrderedDict[str, Destination] = OrderedDict()

    def contradiction(self, decode: Peer, named: Destination) -> str | None:
        """In what a destination differs from what that process offered before, or None if it is the same or the first.

        Only one that is taken should be asked about: from then on it counts.
        """
        known = self._of_boot.setdefault(decode.boot_id, named)
        self._of_boot.move_to_end(decode.boot_id)
        if len(self._of_boot) > self._limit:
            self._of_boot.popitem(last=False)
        differing = [name for name in Destination.model_fields if getattr(known, name) != getattr(named, name)]
        if not differing:
            return None
        return f"{decode.address} offered another destination before: {', '.join(differing)} changed"
