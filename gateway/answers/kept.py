"""Answers of OpenAI's endpoints that do not stream, while they grow."""

from array import array
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from control.prompt_logprobs import PromptLogprobTable
from gateway.answers.streamed import CHARACTER_BYTES, Column
from gateway.attempt import Delta, EndReason


class KeptAnswer:
    """One answer that does not stream, as it grows."""

    __slots__ = (
        "_has_offsets",
        "_logprob_sum",
        "_text",
        "columns",
        "finish_reason",
        "offsets",
        "prompt",
        "size",
        "stop",
        "tokens",
    )

    def __init__(self, has_offsets: bool) -> None:
        """has_offsets: also without columns."""
        self._has_offsets = has_offsets
        self._text = StringIO()
        self._logprob_sum = 0.0
        self.columns: dict[str, Column[Any]] = {}
        """By name, what there is for each token."""
        self.offsets = array("i")
        """Where in the text each token begins, counted with the stop string; where there are columns, or asked for."""
        self.tokens = 0
        self.finish_reason: EndReason | None = None
        self.stop: str | int | None = None
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
        for token in delta.tokens:
            self._logprob_sum += token.logprob or 0.0
        self.finish_reason, self.stop = delta.finish_reason, delta.stop
        if delta.prompt is not None:
            self.prompt = delta.prompt
        size = CHARACTER_BYTES * len(delta.text)
        for name, elements in columns.items():
            column = self.columns.setdefault(name, Column())
            before = len(column)
            column.extend(elements)
            size += len(column) - before
        if columns or self._has_offsets:
            self.offsets.extend(delta.offsets)
            size += self.offsets.itemsize * len(delta.offsets)
        self.size += size
        return size
