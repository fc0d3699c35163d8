"""Answers that do not stream, as they grow: text, and lists that become JSON as they come.

An answer with log probabilities is rendered token by token while it is generated, rather than all at once at its end,
which would take seconds. What is kept is the size of what is sent.
"""

from array import array
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from itertools import islice

import orjson

from control.messages import FinishReason
from control.prompt_logprobs import PromptLogprobTable
from gateway.choice import Delta

CHARACTER_BYTES = 4
"""What a character of text counts."""
_AT_ONCE = 1024
"""Elements that become JSON at a time: orjson lets no other thread run meanwhile."""


class Column:
    """A list of which only the JSON is kept."""

    __slots__ = ("_json",)

    def __init__(self, elements: Iterable[object] = ()) -> None:
        self._json = bytearray(b"[]")
        self.extend(elements)

    def __len__(self) -> int:
        """Bytes."""
        return len(self._json)

    @property
    def json(self) -> bytes:
        return bytes(self._json)

    def extend(self, elements: Iterable[object]) -> None:
        """Append elements."""
        rest = iter(elements)
        while some := list(islice(rest, _AT_ONCE)):
            self.append_json(orjson.dumps(some))

    def append_json(self, elements: bytes) -> None:
        """Append the elements of another list, which is JSON already."""
        if len(elements) > len(b"[]"):
            self._json[-1:] = b"," if len(self._json) > len(b"[]") else b""
            self._json += memoryview(elements)[1:]


class KeptAnswer:
    """One answer that does not stream."""

    __slots__ = ("_logprob_sum", "_text", "columns", "finish_reason", "offsets", "prompt", "size", "tokens")

    def __init__(self) -> None:
        self._text = StringIO()
        self._logprob_sum = 0.0
        self.columns: dict[str, Column] = {}
        """By name, what there is for each token."""
        self.offsets = array("i")
        """Where in the text each token begins, counted with the stop string; kept where there are columns."""
        self.tokens = 0
        self.finish_reason: FinishReason | None = None
        self.prompt: PromptLogprobTable | None = None
        self.size = 0
        """Bytes that it takes."""

    @property
    def text(self) -> str:
        return self._text.getvalue()

    @property
    def average_logprob(self) -> float:
        return self._logprob_sum / max(1, self.tokens)

    def add(self, delta: Delta, columns: Mapping[str, Sequence[object]]) -> int:
        """Go on with a delta. columns: by name, what there is for its tokens. Returns the bytes that this takes."""
        self._text.write(delta.text)
        self.tokens += len(delta.tokens)
        self._logprob_sum += sum(token.logprob or 0.0 for token in delta.tokens)
        self.finish_reason = delta.finish_reason
        if delta.prompt is not None:
            self.prompt = delta.prompt
        size = CHARACTER_BYTES * len(delta.text)
        for name, elements in columns.items():
            column = self.columns.setdefault(name, Column())
            before = len(column)
            column.extend(elements)
            size += len(column) - before
        if columns:
            self.offsets.extend(delta.offsets)
            size += self.offsets.itemsize * len(delta.offsets)
        self.size += size
        return size
