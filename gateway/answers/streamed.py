"""What all answers have in common: they come whole, or as server-sent events.

They are declared as TypedDicts. Renderers fill these, which mypy checks, and `gateway.openapi` makes schemas of them.
"""

import json
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, get_args

import orjson
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema

from gateway.attempt import Delta
from gateway.errors import ApiError
from gateway.held_answers import HeldBytes
from gateway.preparer import PreparedRequest
from gateway.tokenizer import CheckpointTokenizer

Json: TypeAlias = Mapping[str, object]
"""A document; every TypedDict is one."""
CHARACTER_BYTES = 4
"""What a character of kept text counts."""
_AT_ONCE = 1024
"""Elements that become JSON at a time: orjson lets no other thread run meanwhile."""
_T = TypeVar("_T")


class Column(Generic[_T]):
    """A list of which only the JSON is kept: log probabilities are larger as objects, and take seconds to render."""

    __slots__ = ("_json",)

    def __init__(self, elements: Iterable[_T] = ()) -> None:
        self._json = bytearray(b"[]")
        self.extend(elements)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The schema of a list of the same elements."""
        return handler(list[get_args(source)[0]])  # type: ignore[misc]

    def __len__(self) -> int:
        """Bytes."""
        return len(self._json)

    @property
    def json(self) -> bytes:
        return bytes(self._json)

    def extend(self, elements: Iterable[_T]) -> None:
        """Append elements."""
        rest = iter(elements)
        while some := list(islice(rest, _AT_ONCE)):
            self._append(orjson.dumps(some))

    def append(self, other: "Column[_T]") -> None:
        self._append(other._json)

    def _append(self, elements: bytes | bytearray) -> None:
        if len(elements) > len(b"[]"):
            self._json[-1:] = b"," if len(self._json) > len(b"[]") else b""
            self._json += memoryview(elements)[1:]


@dataclass(eq=False)
class Answer(ABC):
    """Renders the answers to a request. Each delta must be passed once, in order. held: counts what is kept of them."""

    prepared: PreparedRequest
    model: str
    tokenizer: CheckpointTokenizer
    held: HeldBytes
    kept_bytes: int = field(default=0, init=False)
    """What a stream repeats later on, perhaps in one event."""

    def __post_init__(self) -> None:  # noqa: B027 - a renderer may have no state of its own
        """Make the state of a renderer."""

    @abstractmethod
    def keep(self, index: int, delta: Delta) -> None:
        """Keep a delta of a request that does not stream. Raises ApiError if too much is kept."""

    @abstractmethod
    def whole(self) -> Json:
        """The answers to a request that does not stream, of which all deltas were kept. Any thread may call it."""


class StreamedAnswer(Answer):
    """Renders streams, too."""

    named: ClassVar[bool] = False
    """Each event says its type in a line of its own, too."""
    last_line: ClassVar[bytes] = b""
    """What ends a stream."""

    @abstractmethod
    def begin(self) -> Sequence[Json]:
        """The events before any text."""

    @abstractmethod
    def delta_events(self, index: int, delta: Delta) -> Sequence[Json]:
        """The events of a delta."""

    @abstractmethod
    def end(self) -> Sequence[Json]:
        """The events after all answers."""

    @abstractmethod
    def failed(self, error: ApiError) -> Sequence[Json]:
        """The events that end a stream which breaks."""

    def encode_delta(self, index: int, delta: Delta) -> bytes:
        """The events of a delta, as they are sent."""
        return self.encode(self.delta_events(index, delta))

    def encode(self, events: Iterable[Json]) -> bytes:
        """Events as they are sent."""
        return b"".join(map(self._encode_event, events))

    def _encode_event(self, event: Json) -> bytes:
        data = b"data: %b\n\n" % encode_json(event)
        return b"event: %b\n%b" % (str(event["type"]).encode(), data) if self.named else data


def encode_json(document: Json | Sequence[object]) -> bytes:
    """JSON. Columns in a document are its lists."""
    try:
        return orjson.dumps(document, default=lambda column: orjson.Fragment(_json_of(column)))
    except TypeError:
        # It may repeat what the client sent, such as a schema with integers of more than 64 bits.
        place, columns = uuid.uuid4().hex, []

        def placed(column: object) -> str:
            columns.append(_json_of(column))
            return place

        text = json.dumps(document, separators=(",", ":"), default=placed).encode()
        first, *others = text.split(f'"{place}"'.encode())
        return b"".join([first, *(part for pair in zip(columns, others, strict=True) for part in pair)])


def _json_of(value: object) -> bytes:
    if not isinstance(value, Column):
        raise TypeError(f"{type(value).__name__} is not JSON")
    return value.json
