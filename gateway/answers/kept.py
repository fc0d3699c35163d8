"""Answers of OpenAI's endpoints that do not stream, while they grow."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

from control.prompt_logprobs import PromptLogprobTable
from gateway.answers.streamed import CHARACTER_BYTES, Column
from gateway.attempt import Delta, EndReason


@dataclass(slots=True)
class KeptAnswer:
    """One answer that does not stream, as it grows."""

    columns: dict[str, Column[Any]] = field(init=False, default_factory=dict)
    """By name, what there is for each token."""
    offsets: "array[int]" = field(init=False, default_factory=lambda: array("i"))
    """Where in the text each token begins, counted with the stop string."""
    tokens: int = field(init=False, default=0)
    finish_reason: EndReason | None = field(init=False, default=None)
    stop: str | int | None = field(init=False, default=None)
    prompt: PromptLogprobTable | None = field(init=False, default=None)
    _text: StringIO = field(init=False, default_factory=StringIO)
    _logprob_sum: float = field(init=False, default=0.0)

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
        self.offsets.extend(delta.offsets)
        return size + self.offsets.itemsize * len(delta.offsets)
