"""What the answers of all endpoints have in common: they come whole, or as server-sent events."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import orjson

from gateway.choice import Delta
from gateway.errors import ApiError
from gateway.prepared import Prepared
from gateway.tokenizer import CheckpointTokenizer

Json = dict[str, Any]


class StreamedAnswer(ABC):
    """Renders the answers to one request, whole or in events. Each delta must be passed once, in order."""

    named: ClassVar[bool] = False
    """Each event says its type in a line of its own, too."""
    last_line: ClassVar[bytes] = b""
    """What ends a stream."""

    @abstractmethod
    def __init__(self, prepared: Prepared, model: str, tokenizer: CheckpointTokenizer) -> None: ...

    @abstractmethod
    def whole(self, answers: Sequence[Sequence[Delta]], unused: Sequence[Sequence[Delta]] = ()) -> Json:
        """The answers to a request that does not stream. unused: others that were generated, which count, too."""

    @abstractmethod
    def begin(self) -> list[Json]:
        """The events before any text."""

    @abstractmethod
    def more(self, index: int, delta: Delta) -> list[Json]:
        """The events of what an answer goes on with."""

    @abstractmethod
    def end(self) -> list[Json]:
        """The events after all answers."""

    @abstractmethod
    def failed(self, error: ApiError) -> list[Json]:
        """The events that end a stream which breaks."""

    def written(self, index: int, delta: Delta) -> bytes:
        """The events of what an answer goes on with, as they are sent."""
        return self.lines(self.more(index, delta))

    def lines(self, events: Iterable[Json]) -> bytes:
        """Events as they are sent."""
        return b"".join(map(self._line, events))

    def _line(self, event: Json) -> bytes:
        data = b"data: %b\n\n" % _rendered(event)
        return b"event: %b\n%b" % (event["type"].encode(), data) if self.named else data


def _rendered(event: Json) -> bytes:
    try:
        return orjson.dumps(event)
    except TypeError:
        # An event may repeat what the client sent, such as a schema with integers of more than 64 bits.
        return json.dumps(event, separators=(",", ":")).encode()
