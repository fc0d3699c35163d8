# ruff: noqa: RUF001 - DSML has full-width bars
"""Answers that are broken in random ways: nothing raises, no call is invented, no text is lost."""

import json
import random
from collections.abc import Iterator

import pytest

from gateway.formats.parsing import CallArguments, CallBegin, CallEnd, ContentDelta, Event, ReasoningDelta
from tests.gateway.formats.examples import EXAMPLES, TOOLS, Call, Example, calls_of, parse, parser_of

_MARKERS = {
    "dsml": (
        "</think>",
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="',
        "</｜DSML｜invoke>",
        '<｜DSML｜parameter name="',
        '" string="true">',
        '" string="false">',
        "</｜DSML｜parameter>",
        '">',
    ),
    "glm": (
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ),
    "hermes": ("</think>", "<tool_call>", "</tool_call>", '{"name": ', ', "arguments": '),
}
_NAMES = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 5_000), *(pytest.param(seed, 10_000, marks=pytest.mark.slow) for seed in range(1, 11))]
)
def test_broken_answers_invent_no_call_and_lose_no_text(seed: int, count: int) -> None:
    chance = random.Random(seed)
    complete = broken = 0
    for _ in range(count):
        example = chance.choice(EXAMPLES)
        text = mutated(example, chance)
        reasoning = chance.random() < 0.3
        whole_calls = chance.random() < 0.5

        events = parse(parser_of(example.family, reasoning=reasoning, whole_calls=whole_calls), [text])
        pieces = cut(text, chance)
        assert parse(parser_of(example.family, reasoning=reasoning, whole_calls=whole_calls), pieces) == events, text

        calls = calls_of(events)
        assert len({call.call_id for call in calls}) == len(calls)
        for call in calls:
            assert_is_no_invention(call, text)
            assert call.ended or not whole_calls
        assert_is_all_there(events, text, example.family)
        complete += sum(call.ended for call in calls)
        broken += sum(not call.ended for call in calls)
    assert complete > count / 10
    assert broken > count / 50


def mutated(example: Example, chance: random.Random) -> str:
    """The example's text with one to four deletions, duplications, truncations, swaps, or markers in wrong places."""
    text = example.text
    markers = _MARKERS[example.family]
    for _ in range(chance.randint(1, 4)):
        a, b = sorted(chance.randint(0, len(text)) for _ in range(2))
        b = min(b, a + chance.choice((1, 5, 40, 1000)))
        at = chance.randint(0, len(text))
        marker, other = chance.choice(markers), chance.choice(markers)
        match chance.randint(0, 7):
            case 0:
                text = text[:a] + text[b:]
            case 1:
                text = text[:b] + text[a:b] + text[b:]
            case 2:
                text = text[:at] if chance.random() < 0.5 else text
            case 3:
                text = text[:at] + marker + text[at:]
            case 4:
                text = text.replace(marker, other, chance.randint(1, 2))
            case 5:
                text = text.replace(marker, "", 1)
            case 6:
                text = text.replace(marker, "\0").replace(other, marker).replace("\0", other)
            case 7:
                text = text[:at] + text[a:b] + text[at:]
    return text


def cut(text: str, chance: random.Random) -> list[str]:
    longest = chance.choice((2, 12, 60))
    pieces = []
    while text:
        length = chance.randint(1, longest)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def assert_is_no_invention(call: Call, text: str) -> None:
    assert call.name in _NAMES
    assert call.name in text
    if not call.ended:
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.arguments)
    arguments, unfinished = arguments_of(call)
    assert all(key in text for key in arguments)
    assert arguments or unfinished or not _NAMES[call.name]["required"]


def arguments_of(call: Call) -> tuple[dict[str, object], tuple[str, str] | None]:
    """The arguments of a call, and of one that broke in an array or an object its key and what was given of it.

    Apart from that, only the end is missing of the arguments of a call that broke.
    """
    for end in ("",) if call.ended else ('"}', "}"):
        try:
            found = json.loads(call.arguments + end)
        except ValueError:
            continue
        assert isinstance(found, dict)
        return found, None
    assert not call.ended, call.arguments
    decoder = json.JSONDecoder()
    arguments: dict[str, object] = {}
    at = 1
    while True:
        key, at = decoder.raw_decode(call.arguments, at)
        at += len(": ")
        try:
            arguments[key], at = decoder.raw_decode(call.arguments, at)
        except ValueError:
            assert call.arguments[at] in "[{", call.arguments
            return arguments, (key, call.arguments[at:])
        at += len(", ")


def assert_is_all_there(events: list[Event], text: str, family: str) -> None:
    """Reasoning, content, keys and values stand in the text, in this order, with only markup and names between them."""
    markup = (*_MARKERS[family], *_NAMES)
    places = behind_markup({0}, text, markup)
    for piece in given(events, family):
        places = behind_markup({end for at in places for end in ends_of(piece, text, at)}, text, markup)
    assert len(text) in places, (text, events)


def behind_markup(places: set[int], text: str, markup: tuple[str, ...]) -> set[int]:
    """The places and all that are reached from them over markup and white space."""
    reached: set[int] = set()
    waiting = list(places)
    while waiting:
        at = waiting.pop()
        if at in reached:
            continue
        reached.add(at)
        waiting.extend(at + len(marker) for marker in markup if text.startswith(marker, at))
        if text[at : at + 1].isspace():
            waiting.append(at + 1)
    return reached


def given(events: list[Event], family: str) -> Iterator[tuple[str, object]]:
    """What stands in the text: text as it is, a string as it is or as JSON, or another JSON value."""
    calls = iter(calls_of(events))
    for event in events:
        match event:
            case ReasoningDelta(piece) | ContentDelta(piece):
                yield "text", piece
            case CallBegin(name=name):
                call = next(calls)
                if family == "hermes":
                    yield "json", {"name": name, "arguments": arguments_of(call)[0]}
                    continue
                given_arguments, unfinished = arguments_of(call)
                for key, value in given_arguments.items():
                    yield "text", key
                    yield "string" if isinstance(value, str) else "json", value
                if unfinished:
                    yield from (("text", unfinished[0]), ("text", unfinished[1]))
            case CallArguments() | CallEnd():
                pass


def ends_of(piece: tuple[str, object], text: str, at: int) -> Iterator[int]:
    """Where the piece ends if it stands at this place of the text."""
    kind, value = piece
    if isinstance(value, str) and kind != "json":
        written = {value}
        if kind == "string":  # of type string, or JSON, which may be cut off
            quoted = json.dumps(value, ensure_ascii=False)
            written |= {quoted, quoted[:-1]}
        yield from (at + len(form) for form in written if text.startswith(form, at))
        return
    try:
        found, end = json.JSONDecoder().raw_decode(text, at)
    except ValueError:
        return
    if found == value:
        yield end
