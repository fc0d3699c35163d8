# ruff: noqa: RUF001 - DSML has full-width bars
"""Grammars of calls: what they let through is what the parsers read as calls, and calls alone."""

import itertools
import json
import random
import tracemalloc
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer

from control.grammar import MAX_LARK, Lark
from engine.grammar.vocabulary import Vocabulary
from gateway.formats.conversation import FormatError
from gateway.formats.tools import CallRules, ToolSet
from tests.gateway.formats.examples import TOOLS, calls_of, content_of, parse, parsing_format, tool
from tests.gateway.world import EOS, byte_tokenizer

llguidance = pytest.importorskip("llguidance")
TYPED = [
    tool(
        "f",
        {
            "text": {"type": "string"},
            "kind": {"enum": ["a", 'b"c', "d\n"]},
            "count": {"type": "integer", "minimum": 1, "maximum": 20},
            "rows": {"type": "array", "items": {"$ref": "#/$defs/row"}, "maxItems": 2},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "boolean"}]},
        },
        ["text", "count", "unnamed"],
    ),
    tool("g"),
]
TYPED[0]["function"]["parameters"]["$defs"] = {
    "row": {
        "type": "object",
        "properties": {"x": {"type": "boolean"}},
        "required": ["x"],
        "additionalProperties": False,
    }
}
_HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Paris", "date": "x"}}\n</tool_call>'
_GLM = "<tool_call>get_weather<arg_key>location</arg_key><arg_value>北<京</arg_value></tool_call>"
_DSML = (
    '<｜DSML｜invoke name="get_weather">\n'
    '<｜DSML｜parameter name="location" string="true">a "<b>\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="date" string="true"></｜DSML｜parameter>\n</｜DSML｜invoke>\n'
)
_BLOCK = "\n\n<｜DSML｜function_calls>\n%s</｜DSML｜function_calls>"
ENDS = (b"</arg_value>", "</｜DSML｜parameter>".encode(), b'"')
WRITTEN = [
    ("hermes", _HERMES, f"{_HERMES}\n{_HERMES}"),
    ("glm", _GLM, _GLM + "<tool_call>get_datetime</tool_call>"),
    ("dsml", _BLOCK % _DSML, _BLOCK % (_DSML * 2)),
]


MARKERS = ("｜DSML｜", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")


@cache
def tokenizer() -> Tokenizer:
    """Each byte a token, and each marker."""
    made = byte_tokenizer()
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return made


@cache
def vocabulary() -> Any:
    return Vocabulary(json.loads(tokenizer().to_str()), tokenizer().get_vocab_size(), [EOS]).library


TOKEN_IDS = {text: tokenizer().token_to_id(text) for text in MARKERS}


def forced(tools: list[dict[str, Any]], parallel: bool = True) -> CallRules:
    return CallRules(ToolSet(tools), forced=True, parallel=parallel)


def matcher_of(grammar: str | None, tokens: Any = None) -> Any:
    assert grammar is not None
    tokens = tokens or llguidance.LLTokenizer("byte")
    assert not llguidance.LLMatcher.validate_grammar(grammar, tokens)
    matcher = llguidance.LLMatcher(tokens, grammar)
    assert not matcher.get_error()
    return matcher


def accepts(grammar: str | None, text: str) -> bool:
    matcher = matcher_of(grammar)
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


@pytest.mark.parametrize("family", ["dsml", "glm", "hermes"])
def test_some_call_is_demanded(family: str) -> None:
    grammar = parsing_format(family).call_grammar(forced(TOOLS))
    assert not accepts(grammar, "")
    assert not accepts(grammar, "Hello.")


@pytest.mark.parametrize(("family", "first", "second"), WRITTEN)
def test_calls_in_the_familys_layout_are_let_through(family: str, first: str, second: str) -> None:
    chosen = parsing_format(family)
    assert accepts(chosen.call_grammar(forced(TOOLS)), first)
    assert accepts(chosen.call_grammar(forced(TOOLS)), second)
    assert not accepts(chosen.call_grammar(forced(TOOLS, parallel=False)), second)
    assert accepts(chosen.call_grammar(forced(TOOLS[1:2])), first)
    assert not accepts(chosen.call_grammar(forced(TOOLS[2:])), first)
    assert not accepts(chosen.call_grammar(forced(TOOLS)), first.replace("location", "lacking"))


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(("family", "first", "second"), WRITTEN)
def test_an_answer_that_is_free_to_call_may(family: str, first: str, second: str, tokens: bool) -> None:
    wrong = first.replace("location", "lacking")
    for parallel, strict in itertools.product((True, False), (frozenset(), frozenset({"get_weather"}))):
        rules = CallRules(ToolSet(TOOLS), parallel=parallel, strict=strict)
        grammar = parsing_format(family).call_grammar(rules, TOKEN_IDS if tokens else None)

        def allows(text: str, grammar: str | None = grammar) -> bool:
            matcher = matcher_of(grammar, vocabulary())
            ids = tokenizer().encode(text).ids if tokens else list(text.encode())
            return matcher.try_consume_tokens(ids) == len(ids) and bool(matcher.is_accepting())

        assert all(map(allows, ("", "a < b", first, f"I ask: {first}")))
        assert allows(second) == allows(f"{first} and so") == parallel
        assert allows(wrong) == allows(f"I ask: {wrong}") == (not strict)
        assert not allows(first[: len(first) // 2])


@pytest.mark.parametrize(("family", "first", "second"), WRITTEN)
def test_a_marker_that_is_a_token_is_written_as_that_token(family: str, first: str, second: str) -> None:
    grammar = parsing_format(family).call_grammar(forced(TOOLS), token_ids=TOKEN_IDS)
    for text in (first, second):
        ids = tokenizer().encode(text).ids
        assert set(ids) & set(TOKEN_IDS.values())
        matcher = matcher_of(grammar, vocabulary())
        assert matcher.try_consume_tokens(ids) == len(ids)
        assert matcher.is_accepting()
        begin = matcher_of(grammar, vocabulary())
        marker = next(token_id for token_id in ids if token_id > EOS)
        begin.consume_tokens(ids[: ids.index(marker)])
        allowed = [token for token, bias in enumerate(begin.compute_logit_bias()) if bias]
        assert allowed == [marker], "the letters that spell it are something else"


@pytest.mark.parametrize("family", ["dsml", "glm", "hermes"])
def test_a_grammar_that_is_too_long_is_never_made(family: str) -> None:
    """Made, it would have 200 million characters, since every argument's schema has the definitions with it."""
    made = tool("f", {f"a{number}": {"type": "array"} for number in range(2000)})
    made["function"]["parameters"]["$defs"] = {f"d{number}": {"type": "string"} for number in range(4000)}
    chosen, tools = parsing_format(family), forced([made])
    tracemalloc.start()
    with pytest.raises(FormatError, match="65536 characters"):
        chosen.call_grammar(tools)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20


@pytest.mark.parametrize("family", ["dsml", "glm", "hermes"])
def test_a_grammar_may_be_as_long_as_decode_nodes_take(family: str) -> None:
    chosen = parsing_format(family)

    def grammar(length: int) -> str:
        text = chosen.call_grammar(forced([tool("f", {"a": {"const": [1], "title": "x" * length}})]))
        assert text is not None
        return text

    longest = MAX_LARK - len(grammar(0))
    assert Lark(grammar=grammar(longest))
    with pytest.raises(FormatError):
        grammar(longest + 1)


def test_a_string_ends_at_its_marker_spelled_or_not() -> None:
    grammar = parsing_format("glm").call_grammar(forced(TOOLS[1:2]), token_ids=TOKEN_IDS)
    begin = tokenizer().encode("<tool_call>get_weather<arg_key>location</arg_key><arg_value>a<b").ids
    for end in (list(b"</arg_value>"), [TOKEN_IDS["</arg_value>"]]):
        matcher = matcher_of(grammar, vocabulary())
        matcher.consume_tokens([*begin, *end])
        allowed = {token for token, bias in enumerate(matcher.compute_logit_bias()) if bias}
        assert allowed == {TOKEN_IDS["<arg_key>"], TOKEN_IDS["</tool_call>"]}


@pytest.mark.parametrize("tokens", [False, True], ids=["spelled", "tokens"])
@pytest.mark.parametrize("family", ["dsml", "glm", "hermes"])
def test_what_is_let_through_is_read_as_calls(family: str, tokens: bool) -> None:
    chosen = parsing_format(family)
    grammar = chosen.call_grammar(forced(TYPED), token_ids=TOKEN_IDS if tokens else None)
    chance = random.Random(0)
    complete = 0
    for _ in range(40):
        text = sampled(matcher_of(grammar, vocabulary() if tokens else None), chance, TOKEN_IDS if tokens else {})
        if text is None:
            continue
        complete += 1
        events = parse(chosen.parser(CallRules(ToolSet(TYPED)), reasoning=False, whole_calls=True), [text])
        assert content_of(events).strip() == "", text
        calls = calls_of(events)
        assert calls, text
        for call in calls:
            arguments = json.loads(call.arguments)
            if call.name == "f":
                assert {"text", "count", "unnamed"} <= arguments.keys()
                assert isinstance(arguments["text"], str)
                assert 1 <= arguments["count"] <= 20
                assert arguments.get("kind") in (None, "a", 'b"c', "d\n")
                assert all(row.keys() == {"x"} for row in arguments.get("rows", ()))
    assert complete >= 10


def sampled(matcher: Any, chance: random.Random, ids: dict[str, int], longest: int = 3000) -> str | None:
    """A random text that a grammar lets through; None if it becomes too long."""
    text = bytearray()
    texts = {token_id: marker.encode() for marker, token_id in ids.items()}
    letters = set(b'ab<>/ "\n1}')
    while len(text) < longest:
        if matcher.is_accepting() and chance.random() < 0.5:
            return text.decode()
        allowed = [t for t, bias in enumerate(matcher.compute_logit_bias()) if bias and (t < 256 or t in texts)]
        if not allowed:
            assert matcher.is_accepting()
            return text.decode()
        if allowed[-1] in texts and chance.random() < 0.3:
            matcher.consume_token(allowed[-1])
            text += texts[allowed[-1]]
            continue
        likely = [token for token in allowed if token in letters]
        if len(allowed) > 100 and chance.random() < 0.5:  # inside a string: end it
            for end in ENDS:
                if matcher.validate_tokens(list(end)) == len(end):
                    matcher.consume_tokens(list(end))
                    text += end
                    break
            else:
                matcher.consume_token(ord("a"))
                text += b"a"
            continue
        token = chance.choice(likely if likely and chance.random() < 0.8 else allowed)
        matcher.consume_token(token)
        text += texts.get(token, bytes([token % 256]))
    return None
