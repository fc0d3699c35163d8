"""What the answers of all endpoints have in common: they come whole, or as server-sent events."""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import orjson

from gateway.answers.kept import Column
from gateway.choice import Delta
from gateway.errors import ApiError
from gateway.held_answers import AnswerBytes
from gateway.prepared import Prepared
from gateway.tokenizer import CheckpointTokenizer

Json = dict[str, Any]


class StreamedAnswer(ABC):
    """Renders the answers to one request, whole or in events. Each delta must be passed once, in order."""

    named: ClassVar[bool] = False
    """Each event says its type in a line of its own, too."""
    last_line: ClassVar[bytes] = b""
    """What ends a stream."""
    kept_bytes: int = 0
    """What a stream repeats later on, perhaps in one event."""

    @abstractmethod
    def __init__(self, prepared: Prepared, model: str, tokenizer: CheckpointTokenizer, held: AnswerBytes) -> None:
        """held: counts what is kept of the answers."""

    @abstractmethod
    def keep(self, index: int, delta: Delta) -> None:
        """Keep what an answer goes on with, of a request that does not stream. Raises ApiError if that is too much."""

    @abstractmethod
    def whole(self) -> Json:
        """The answers to a request that does not stream, of which all deltas were kept. Any thread may call it."""

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
        data = b"data: %b\n\n" % rendered(event)
        return b"event: %b\n%b" % (event["type"].encode(), data) if self.named else data


def rendered(document: Json) -> bytes:
    """JSON. Columns in a document are its lists."""
    try:
        return orjson.dumps(document, default=_fragment)
    except TypeError:
        # It may repeat what the client sent, such as a schema with integers of more than 64 bits.
        return _rendered_by_json(document)


def _fragment(value: object) -> orjson.Fragment:
    if not isinstance(value, Column):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return orjson.Fragment(value.json)


def _rendered_by_json(document: Json) -> bytes:
    place, columns = uuid.uuid4().hex, []

    def placed(value: object) -> str:
        assert isinstance(value, Column), "everything else in a document is JSON"
        columns.append(value.json)
        return place

    first, *others = json.dumps(document, separators=(",", ":"), default=placed).encode().split(f'"{place}"'.encode())
    return b"".join([first, *(part for pair in zip(columns, others, strict=True) for part in pair)])
