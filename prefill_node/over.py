"""What is over at a prefill node, and what is said of it whenever a decode node comes back to it."""

from collections.abc import Sequence

from base.tombstones import Tombstones
from control.messages import NotHeld, Peer, PrefillFailed, Quiesced
from prefill_node.entry import Key


class Over:
    """Owns the keys that were said to be over, and those of which the network may still carry something.

    That they linger is repeated in every answer about them, since each may be lost. One loop calls it.
    """

    def __init__(self) -> None:
        self._keys: Tombstones[Key] = Tombstones()
        self._lingering: Tombstones[Key] = Tombstones()

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def add(self, key: Key) -> None:
        """It was said to be over: a repeat of its request that was under way must not start it again."""
        self._keys.add(key)

    def note_lingering(self, key: Key) -> None:
        """A write of it was cut or given up, and the network may still carry it, also if it was repeated and landed.

        It need not be over yet.
        """
        self._lingering.add(key)

    def lingers(self, key: Key) -> bool:
        return key in self._lingering

    def quiesced(self, key: Key) -> Quiesced:
        """To be said when nothing of it is in flight."""
        _, request_id, epoch = key
        return Quiesced(request_id=request_id, epoch=epoch, lingering=self.lingers(key))

    def failed(self, key: Key, reason: str, *, in_flight: bool, leaving: bool) -> PrefillFailed:
        """To be said when it will not be completed here."""
        _, request_id, epoch = key
        return PrefillFailed(
            request_id=request_id,
            epoch=epoch,
            reason=reason,
            in_flight=in_flight,
            lingering=self.lingers(key),
            leaving=leaving,
        )

    def not_held(self, decode: Peer, pairs: Sequence[tuple[str, int]]) -> list[Quiesced | NotHeld]:
        """What a decode node is told of (request, epoch) pairs that it asks about and of which nothing is here."""
        keys = [(decode.boot_id, *pair) for pair in pairs]
        answers: list[Quiesced | NotHeld] = [self.quiesced(key) for key in keys if self.lingers(key)]
        if quiet := tuple(pair for key, pair in zip(keys, pairs, strict=True) if not self.lingers(key)):
            answers.append(NotHeld(keys=quiet))
        return answers
