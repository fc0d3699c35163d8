"""The parser that all families share: reasoning, then content with calls in it. A family adds the syntax of calls."""

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import ClassVar, TypeAlias

from gateway.formats.conversation import to_json
from gateway.formats.grammar import CallGrammar
from gateway.formats.json_prefix import JsonPrefix
from gateway.formats.reading import Malformed, PieceReader, Steps, overlap
from gateway.formats.tools import CallRules, ToolSet


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More text of the reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A tool call whose name is one of the request's tools. index: 0, 1, ... within the answer."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments. The first piece begins with "{"."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete: its arguments are one JSON object. A call without this event was cut off or broke."""

    index: int


Event: TypeAlias = ReasoningDelta | ContentDelta | CallBegin | CallArguments | CallEnd


class CallParser(PieceReader, ABC):
    """A recursive descent through an answer that waits, in the middle of any step, for more text.

    What is held back:

    - text that may become a marker: until it is one, or cannot become one;
    - white space in front of a call: until the call is certain (it belongs to the call then) or other text comes;
    - the beginning of a call: until its name is one of the tools and its first argument has begun (or the call ends
      without arguments, which is a call only if the tool requires none);
    - the value of an argument: if it is a number or a name, or may be a string or something else, until its end.
      Strings stream, and so do arrays and objects, as far as they are JSON.

    A call that breaks before it is certain is content, from its marker on. If it breaks later, its arguments stay
    without their end (no JSON, no CallEnd), and content goes on with the piece that broke: the whole argument where
    only its value was wrong. So all text is given out, as content or as the value of an argument, except for the
    markup and the white space of what was understood. The answer is read on after the break.
    """

    name: ClassVar[str]
    """Of the syntax, as in --tool-call-parser."""
    sign: ClassVar[str]
    """What a template that teaches this syntax contains."""
    opener: ClassVar[str]
    """The marker in front of calls."""
    markers: ClassVar[frozenset[str]]
    end_of_call: ClassVar[str]
    lead: ClassVar[str] = ""
    """What an answer that is nothing but calls has in front of the opener."""
    separator: ClassVar[str | None] = ""
    """What it has between calls, in front of the opener of each; None: one opener is in front of all calls."""
    trail: ClassVar[str] = ""
    """What it ends with."""

    def __init__(self, rules: CallRules, *, end_of_reasoning: str | None, whole_calls: bool = False) -> None:
        """end_of_reasoning: None if answers begin without. whole_calls: a call that breaks or is cut off is text.

        An answer that is forced to be calls has no text: of a call that is cut off, what streamed is left.
        """
        super().__init__()
        self._tools = rules.tools
        self._has_content = not rules.forced
        self._whole_calls = whole_calls
        self.new_id: Callable[[], str] = lambda: f"call_{secrets.token_hex(12)}"
        self._events: list[Event] = []
        """Certain, and not given out yet. `_taken` has what was read since the last of them; it becomes content if the
        call breaks."""
        self._waiting: list[Event] = []
        """Events of a call that is not certain yet."""
        self._calls = 0
        self._open = False
        """Whether a call has begun, in `_events` or in `_waiting`."""
        self._keys: set[str] = set()
        self.reasoned: float = 0 if end_of_reasoning is None else math.inf
        """Characters up to the end of the reasoning; infinite while all that was pushed is reasoning."""
        self._thought = 0
        """Characters of reasoning that were given out."""
        self.called = False
        """Whether a call was complete."""
        self.only_content = False
        """Whatever is pushed from now on is content and comes back as it is, so it need not be pushed."""
        self._steps = self._answer(end_of_reasoning)
        next(self._steps)

    def push(self, text: str) -> list[Event]:
        """What has become certain with this text."""
        if self.only_content:
            return [ContentDelta(text)] if text else []
        self._add(text)
        next(self._steps)
        return self._give()

    def finish(self) -> list[Event]:
        """What was held back, at the end of the answer. Nothing may be pushed afterwards."""
        self._finished = True
        for _ in self._steps:
            raise AssertionError("a parser waits for text after the end of the answer")
        return self._give()

    @abstractmethod
    def _read_calls(self) -> Steps[None]:
        """Read what follows the opener, up to where content goes on. Raises Malformed."""

    @staticmethod
    @abstractmethod
    def begin_of_call(name: str) -> str:
        """What stands between the opener and a call's arguments."""

    @staticmethod
    def arguments_grammar(rules: CallGrammar, tools: ToolSet, name: str, number: str) -> str:
        """The body of the rule of one tool's arguments. number: of the tool, for the names of rules."""
        return rules.json(f"arguments_{number}", {"type": "object", **tools[name].parameters}, {}, name)

    @staticmethod
    def free_arguments_grammar(rules: CallGrammar) -> str:
        """The body of the rule of arguments that need not follow any schema."""
        return rules.json("any", {"type": "object"}, {}, "")

    @staticmethod
    def calls_grammar(rules: CallGrammar, call: str, parallel: bool) -> str:
        """What follows an opener. call: the rule of one call, up to its end."""
        return call

    # The answer.

    def _answer(self, end_of_reasoning: str | None) -> Steps[None]:
        yield
        if end_of_reasoning is not None:
            try:
                yield from self._until(end_of_reasoning, self._give_reasoning)
            except Malformed:  # it ended in its reasoning
                return
            self.reasoned = self._thought + len(end_of_reasoning)
            self._taken.clear()
        while (yield from self._content()):
            try:
                yield from self._read_calls()
            except Malformed:
                self._break()

    def _content(self) -> Steps[bool]:
        """Give out content. Returns true after an opener, false at the end of the answer."""
        self.only_content = not self._tools
        while True:
            end = len(self._text)
            if self._tools:
                at = self._text.find(self.opener, self._pos)
                end = at if at >= 0 else end - overlap(self._text, self._pos, self.opener)
                if visible := len(self._text[self._pos : end].rstrip()):
                    self._take(visible)
                    self._give_taken()
                # White space waits there, and is not looked at again.
                self._take(end - self._pos)
                if at >= 0:
                    self._take(len(self.opener))
                    return True
            if self._finished or not self._tools:
                self._take(len(self._text) - self._pos)
                self._give_taken()
            if self._finished:
                return False
            yield

    def _give_reasoning(self, text: str) -> None:
        self._thought += len(text)
        self._events.append(ReasoningDelta(text))
        self._taken.clear()

    def _give_taken(self) -> None:
        """Give out what was taken as content."""
        text = "".join(self._taken)
        self._taken.clear()
        if text and self._has_content:
            self._events.append(ContentDelta(text))

    def _break(self) -> None:
        if self._open and not self._whole_calls:
            self._calls += 1
        self._open = False
        self._keys.clear()
        self._waiting.clear()
        if self._finished and self._calls and not "".join(self._taken).strip():
            # White space after the last call of an answer that ends there.
            self._taken.clear()
        self._give_taken()

    # Calls.

    def _begin(self, name: str) -> None:
        self._open = True
        self._waiting.append(CallBegin(self._calls, self.new_id(), name))

    def _key(self, name: str, key: str) -> None:
        """Begin an argument, and the call with its first one."""
        if not self._open:
            self._begin(name)
        self._waiting.append(CallArguments(self._calls, f"{', ' if self._keys else '{'}{to_json(key)}: "))
        self._keys.add(key)

    def _string_value(self, end: str) -> Steps[None]:
        """The value of an argument as a JSON string that streams, up to the marker `end`."""
        self._arguments('"')
        yield from self._until(end, lambda text: self._arguments(to_json(text)[1:-1]))
        self._arguments('"')

    def _json_value(self, name: str, key: str, end: str) -> Steps[None]:
        """An argument of JSON, up to `end`; it breaks where that ceases to be JSON. Numbers and names do not stream."""
        prefix = JsonPrefix()
        value = ""
        streams = broken = False

        def give(text: str) -> None:
            nonlocal value, streams, broken
            if broken:
                return
            good = prefix.read(text)
            broken = good < len(text)
            value += text[:good]
            if not streams:
                value = value.lstrip()
                if value[:1] not in ("[", "{", '"'):
                    return
                streams = True
                self._key(name, key)
            certain = value.rstrip() if prefix.complete else value
            rest = value[len(certain) :] + text[good:]
            value = ""
            if certain:
                self._arguments(certain)
                if rest and not self._taken:  # this made all that was taken certain, and the rest is not
                    self._taken.append(rest)

        yield from self._until(end, give)
        if broken or not prefix.complete:
            raise Malformed
        if not streams:
            self._key(name, key)
            self._arguments(value.strip())

    def _raw_value(self, end: str) -> Steps[str]:
        pieces: list[str] = []
        yield from self._until(end, pieces.append)
        return "".join(pieces)

    def _arguments(self, text: str) -> None:
        self._waiting.append(CallArguments(self._calls, text))
        self._certain()

    def _end(self, name: str) -> None:
        """End a call. Raises Malformed for one without arguments that the tool requires."""
        if not self._open:
            if self._tools[name].required:
                raise Malformed
            self._begin(name)
        self._waiting.append(CallArguments(self._calls, "}" if self._keys else "{}"))
        self._end_call()

    def _end_call(self) -> None:
        self._waiting.append(CallEnd(self._calls))
        self._calls += 1
        self.called = True
        self._open = False
        self._keys.clear()
        self._certain()

    def _certain(self) -> None:
        """What was read is certain, unless the call is to be given whole."""
        if not (self._open and self._whole_calls):
            self._events += self._waiting
            self._waiting.clear()
            self._taken.clear()

    def _give(self) -> list[Event]:
        """The events since the last time, neighbours of one kind put together."""
        events, self._events = self._events, []
        if len(events) < 2:  # as of most tokens
            return events
        given: list[Event] = []
        for _, kind in groupby(events, key=lambda event: (type(event), getattr(event, "index", None))):
            first, *others = kind
            if isinstance(first, ContentDelta | CallArguments):
                texts = [first.text, *(other.text for other in others if isinstance(other, type(first)))]
                given.append(replace(first, text="".join(texts)))
            else:
                given += [first, *others]
        return given
