"""An answer as a sequence of blocks: reasoning, text and calls. Formats differ only in how they write them."""

from abc import ABC
from bisect import bisect_left
from dataclasses import dataclass, field
from io import StringIO
from typing import Literal

from gateway.answers.streamed import CHARACTER_BYTES, Answer
from gateway.attempt import Delta, EndReason
from gateway.formats.parsing import CallArguments, CallBegin, CallEnd, ContentDelta, Event, ReasoningDelta


@dataclass
class Block:
    """A part of an answer. text: of a call, its arguments as JSON. complete: not cut off; of a call, its JSON ended."""

    kind: Literal["reasoning", "text", "call"]
    number: int
    complete: bool = False
    call_id: str = ""
    name: str = ""
    written: StringIO = field(default_factory=StringIO)
    """The text, which grows: adding to a string takes as long as the string is."""

    @property
    def text(self) -> str:
        return self.written.getvalue()


@dataclass(frozen=True)
class Change:
    """A block opens without text, has more text, or ends, complete or not."""

    kind: Literal["opened", "grew", "closed"]
    block: Block
    text: str = ""


class BlockAnswer(Answer, ABC):
    """Renders the only answer to a request as blocks.

    White space between blocks becomes part of a text only together with what follows it there. In an answer that does
    not stream, a call that breaks or is cut off is text.
    """

    def __post_init__(self) -> None:
        assert self.prepared.reading is not None
        self._parser = self.prepared.reading.parser(whole=not self.prepared.request.stream)
        self._blocks: list[Block] = []
        self._open: Block | None = None
        self._space: list[str] = []
        """White space that may begin a text."""
        self._output_tokens = 0
        self._reasoning_tokens = 0
        self._finish_reason: EndReason | None = None
        self._ended_by: str | int | None = None
        """What ended the answer, as `Delta.stop`."""

    def keep(self, index: int, delta: Delta) -> None:
        self._count(CHARACTER_BYTES * len(delta.text))
        for change in self._push(delta):
            self._note(change)

    def _note(self, change: Change) -> object:
        """Keep what a change brings in addition to text."""

    def _count(self, size: int) -> None:
        """Count bytes that are kept from now on. Raises ApiError if that is too much."""
        self.kept_bytes += size
        self.held.take(size)

    def _push(self, delta: Delta) -> list[Change]:
        """What has become certain with this delta."""
        self._output_tokens += len(delta.tokens)
        changes: list[Change] = []
        for event in self._parser.push(delta.text) if delta.text else ():
            self._read(event, changes)
        self._reasoning_tokens += bisect_left(delta.offsets, self._parser.reasoned)
        if delta.finish_reason is not None:
            self._finish_reason, self._ended_by = delta.finish_reason, delta.stop
            for event in self._parser.finish():
                self._read(event, changes)
            if self._space and not self._blocks:
                # There is nothing else.
                self._grow("text", "".join(self._space), changes)
            self._close(changes, ended=delta.finish_reason == "stop")
        return changes

    def _read(self, event: Event, changes: list[Change]) -> None:
        match event:
            case ReasoningDelta(text):
                self._grow("reasoning", text, changes)
            case ContentDelta(text):
                self._content(text, changes)
            case CallBegin(_, call_id, name):
                self._begin(Block("call", len(self._blocks), call_id=call_id, name=name), changes)
            case CallArguments(_, text):
                self._grow("call", text, changes)
            case CallEnd() if self._open is not None:
                self._open.complete = True
                self._close(changes)

    def _content(self, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != "text":
            self._space.append(text)
            if text.isspace():
                return
            text = "".join(self._space)
        self._grow("text", text, changes)

    def _grow(self, kind: Literal["reasoning", "text", "call"], text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(Block(kind, len(self._blocks)), changes)
        assert self._open is not None
        self._open.written.write(text)
        changes.append(Change("grew", self._open, text))

    def _begin(self, block: Block, changes: list[Change]) -> None:
        self._close(changes)
        self._space.clear()
        self._open = block
        self._blocks.append(block)
        changes.append(Change("opened", block))

    def _close(self, changes: list[Change], ended: bool = True) -> None:
        """End the open block, if there is one. ended: the model ended it, unless it is a call."""
        if self._open is not None:
            self._open.complete |= ended and self._open.kind != "call"
            changes.append(Change("closed", self._open))
            self._open = None
