"""An answer as a sequence of blocks: reasoning, text and calls. Formats differ only in how they write them."""

from abc import ABC
from dataclasses import dataclass, field
from typing import Literal

from gateway.answers.streamed import CHARACTER_BYTES, Answer, StreamedAnswer
from gateway.attempt import Delta
from gateway.formats.families import ChatReading
from gateway.formats.parsing import CallArguments, CallBegin, CallEnd, ContentDelta, Event, ReasoningDelta


@dataclass
class Block:
    """A part of an answer. text: of a call, its arguments as JSON. complete: not cut off; of a call, its JSON ended."""

    kind: Literal["reasoning", "text", "call"]
    number: int
    text: str = ""
    complete: bool = False
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Change:
    """A block opens without text, has more text, or ends, complete or not."""

    kind: Literal["opened", "grew", "closed"]
    block: Block
    text: str = ""


@dataclass
class BlockReader:
    """Splits an answer into blocks as it comes. whole: a call that breaks or is cut off is text.

    White space between blocks becomes part of a text only together with what follows it there.
    """

    reading: ChatReading
    whole: bool
    blocks: list[Block] = field(default_factory=list)
    reasoning_tokens: int = 0
    """Tokens that came before any text or call, if the answer begins with reasoning."""
    finish_reason: str | None = None
    stop: str | int | None = None
    """What ended the answer, as `Delta.stop`."""

    def __post_init__(self) -> None:
        self._parser = self.reading.parser(self.whole)
        self._open: Block | None = None
        self._space = ""
        """White space that may begin a text."""

    @property
    def called(self) -> bool:
        """Whether there is a complete call."""
        return any(block.kind == "call" and block.complete for block in self.blocks)

    def push(self, delta: Delta) -> list[Change]:
        """What has become certain with this delta."""
        changes: list[Change] = []
        for event in self._parser.push(delta.text) if delta.text else ():
            self._read(event, changes)
        if self.reading.reasoning and all(block.kind == "reasoning" for block in self.blocks):
            self.reasoning_tokens += len(delta.tokens)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop = delta.finish_reason, delta.stop
            for event in self._parser.finish():
                self._read(event, changes)
            if self._space and not self.blocks:
                # There is nothing else.
                self._grow("text", self._space, changes)
            self._close(changes, ended=delta.finish_reason == "stop")
        return changes

    def _read(self, event: Event, changes: list[Change]) -> None:
        match event:
            case ReasoningDelta(text):
                self._grow("reasoning", text, changes)
            case ContentDelta(text):
                self._content(text, changes)
            case CallBegin(_, call_id, name):
                self._begin(Block("call", len(self.blocks), call_id=call_id, name=name), changes)
            case CallArguments(_, text):
                self._grow("call", text, changes)
            case CallEnd() if self._open is not None:
                self._open.complete = True
                self._close(changes)

    def _content(self, text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != "text":
            self._space += text
            if text := "" if self._space.isspace() else self._space:
                self._space = ""
        if text:
            self._grow("text", text, changes)

    def _grow(self, kind: Literal["reasoning", "text", "call"], text: str, changes: list[Change]) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(Block(kind, len(self.blocks)), changes)
        assert self._open is not None
        self._open.text += text
        changes.append(Change("grew", self._open, text))

    def _begin(self, block: Block, changes: list[Change]) -> None:
        self._close(changes)
        self._space = ""
        self._open = block
        self.blocks.append(block)
        changes.append(Change("opened", block))

    def _close(self, changes: list[Change], ended: bool = True) -> None:
        """End the open block, if there is one. ended: the model ended it, unless it is a call."""
        if self._open is not None:
            self._open.complete |= ended and self._open.kind != "call"
            changes.append(Change("closed", self._open))
            self._open = None


class BlockAnswer(Answer, ABC):
    """Renders the only answer to a request as blocks."""

    def __post_init__(self) -> None:
        assert self.prepared.reading is not None
        self._reader = BlockReader(self.prepared.reading, whole=not self.prepared.request.stream)
        self._output_tokens = 0

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
        self._output_tokens += len(delta.tokens)
        return self._reader.push(delta)


class StreamedBlocks(BlockAnswer, StreamedAnswer, ABC):
    """Streams them, too."""

    named = True
