"""A streamed answer: bytes to events, events to tokens."""

import json
from dataclasses import dataclass
from typing import Any

MOST_TOKEN_IDS = 2**31


@dataclass(frozen=True)
class Arrival:
    """Tokens that came in one event, `at` seconds on the client's clock."""

    at: float
    tokens: int


@dataclass(frozen=True)
class Usage:
    """What the service says that a request took, in tokens.

    cached_tokens: of the prompt, those that did not have to be computed; None if it does not say.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None

    @classmethod
    def read(cls, usage: dict[str, Any]) -> "Usage":
        """Raises KeyError, TypeError, ValueError or OverflowError for what is no usage."""
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        counts = int(usage["prompt_tokens"]), int(usage["completion_tokens"]), int(cached or 0)
        if min(counts) < 0:
            raise ValueError(f"{min(counts)} tokens")
        return cls(counts[0], counts[1], None if cached is None else counts[2])


def is_token_id(value: object) -> bool:
    """Whether it is a number that a token can have: prompts are arrays of int32."""
    return type(value) is int and 0 <= value < MOST_TOKEN_IDS


MOST_LINE_BYTES = 16 << 20
"""Of a stream. A token with twenty alternatives takes some kilobytes."""


class StreamFailed(Exception):
    """The stream does not say what it should. `kind` is what such failures are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EventReader:
    """Cuts a stream of server-sent events into their data. Comments and other fields are passed over.

    Every event has its data in one line, as all that speak this API send it.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Raises StreamFailed for a line without an end."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MOST_LINE_BYTES:
            raise StreamFailed(
                "malformed event", f"expected lines of at most {MOST_LINE_BYTES} bytes, found a longer one"
            )
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


class Answer:
    """What of one completion has arrived.

    An event holds as many tokens as its `token_ids` say, or by how many a usage that comes with every event has grown.
    Where there is neither, an event with text counts as one token, as does one without that is not the last.
    """

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.token_ids: list[int] = []
        """As far as the service says them."""
        self.usage: Usage | None = None
        self.done = False
        """The service said that nothing follows."""
        self._running_usage: bool | None = None
        self._counted = 0

    def take(self, at: float, data: bytes) -> None:
        """An event's data. Raises StreamFailed for an error event, and for what is no part of a completion."""
        if data == b"[DONE]":
            self.done = True
            return
        try:
            event = json.loads(data)
            if error := event.get("error"):
                raise StreamFailed("error event", str(error.get("message") if isinstance(error, dict) else error))
            if usage := event.get("usage"):
                self.usage = Usage.read(usage)
            if choices := event["choices"]:
                if self._running_usage is None:
                    self._running_usage = bool(usage)
                if tokens := self._tokens(choices[0]):
                    self._counted += tokens
                    self.arrivals.append(Arrival(at, tokens))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            shown = data[:200].decode(errors="replace")
            raise StreamFailed("malformed event", f"expected a completion chunk, found {shown}") from error

    def _tokens(self, choice: dict[str, object]) -> int:
        token_ids = choice.get("token_ids")
        if isinstance(token_ids, list):
            if not all(map(is_token_id, token_ids)):
                raise ValueError(f"expected token ids, found {token_ids}")
            self.token_ids += token_ids
            return len(token_ids)
        if self._running_usage and self.usage:
            return self.usage.completion_tokens - self._counted
        return int(bool(choice.get("text")) or choice.get("finish_reason") is None)
