# ruff: noqa: RUF001 - DSML has full-width bars
"""A stream and a whole answer say the same, at each API, wherever tokens, markers and characters are cut."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control.messages import Generate, Output, Token
from gateway.answers.chat import ChatAnswer
from gateway.answers.messages import MessageAnswer
from gateway.answers.responses import ResponseAnswer
from gateway.answers.streamed import StreamedAnswer, encode_json
from gateway.detokenizer import ChoiceText, TextOptions
from gateway.formats.families import ChatReading
from gateway.formats.tools import CallRules, ToolSet
from gateway.generation import TokenizedRequest
from gateway.preparer import GenerationBody, PreparedRequest
from gateway.requests.body import FieldPolicy
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.messages import MessagesRequest
from gateway.requests.responses import ResponsesRequest
from gateway.tokenizer import CheckpointTokenizer
from tests.gateway.formats.examples import TOOLS, parsing_format
from tests.gateway.world import BOS, DSML, EOS, held_answers, write_checkpoint

Json = dict[str, Any]

CALLS = {
    "dsml": f'\n\n<{DSML}function_calls>\n<{DSML}invoke name="get">\n<{DSML}parameter name="where" string="false">'
    f'{{"a": "é"}}</{DSML}parameter>\n</{DSML}invoke>\n</{DSML}function_calls>',
    "glm": "<tool_call>get<arg_key>source</arg_key><arg_value>北京</arg_value></tool_call>",
    "hermes": '<tool_call>\n{"name": "get", "arguments": {"topn": 3}}\n</tool_call>',
}
BITS = ("Hello", "é😀", " ", "  \n\n", "<", "</thi", "</think>", "STOP", "ST", "<tool_", "｜", f"<{DSML}", "ok. ")
ASKED = [{"role": "user", "content": "a"}]
KINDS: dict[str, tuple[type[GenerationBody], type[StreamedAnswer], Json]] = {
    "chat": (ChatCompletionRequest, ChatAnswer, {"messages": ASKED, "logprobs": True}),
    "messages": (MessagesRequest, MessageAnswer, {"messages": ASKED, "max_tokens": 9}),
    "responses": (ResponsesRequest, ResponseAnswer, {"input": "a", "model": "m", "top_logprobs": 1}),
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> CheckpointTokenizer:
    """Each byte is a token."""
    directory: Path = tmp_path_factory.mktemp("checkpoint")
    return CheckpointTokenizer(str(write_checkpoint(directory)))


@st.composite
def outputs(draw: st.DrawFn, family: str) -> list[Output]:
    """Messages of a decode node. Calls come whole: streams have the beginnings of those that do not."""
    ended = draw(st.booleans())
    bits = st.sampled_from([*BITS, *(CALLS[family], CALLS[family]) * ended])
    ids = [*"".join(draw(st.lists(bits, min_size=1, max_size=7))).encode(), EOS]
    if not ended:
        ids = ids[: draw(st.integers(1, len(ids) - 1))]
    made, start = [], 0
    while start < len(ids):
        some = ids[start : start + draw(st.sampled_from((1, 1, 2, 3, 5, 20)))]
        tokens = tuple(Token(token_id=each, logprob=-0.5, top_logprobs=()) for each in some)
        made.append(Output(request_id="r", start=start, tokens=tokens))
        start += len(some)
    return [*made, Output(request_id="r", start=start, finish_reason="stop" if ended else "length")]


def answered(
    kind: str, tokenizer: CheckpointTokenizer, reading: ChatReading, said: Sequence[Output], stops: bool, **fields: Any
) -> tuple[StreamedAnswer, list[Any]]:
    """The renderer of an answer, and its deltas."""
    body_of, answer_of, own = KINDS[kind]
    body = body_of.model_validate({**own, **fields})
    generate = Generate(request_id="r", prompt_ids=(1,), max_new_tokens=999)
    one = TokenizedRequest(generate, streams=bool(body.stream), arrived=0.0, deadline=9e9)
    options = TextOptions(stops=("STOP",) if stops else (), skipped=frozenset({BOS, EOS}))
    prepared = PreparedRequest(body.generation(FieldPolicy(strict=True)), "r", (one,), options, body, reading)
    text, deltas = ChoiceText(tokenizer.detokenizer(options.skipped), options), []
    for output in said:
        deltas.append(text.push(output))
        if deltas[-1].finish_reason is not None:
            break
    return answer_of(prepared, "m", tokenizer, held_answers().account()), deltas


def put_together(kind: str, events: list[Json]) -> Json:
    """What a client makes of a stream, as the whole answer has it."""
    if kind == "responses":
        texts: dict[int, str] = {}
        for event in events:
            if event["type"].endswith(".delta"):
                texts[event["output_index"]] = texts.get(event["output_index"], "") + event["delta"]
        items = events[-1]["response"]["output"]
        said = [item["arguments"] if "arguments" in item else item["content"][0]["text"] for item in items]
        assert said == [texts.get(number, "") for number in range(len(items))]
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items
        return dict(events[-1]["response"])
    if kind == "messages":
        blocks: list[Json] = []
        for event in events:
            if event["type"] == "content_block_start":
                begun = event["content_block"]
                blocks.append({**begun, "input": ""} if "input" in begun else begun)
            for name, more in event["delta"].items() if event["type"] == "content_block_delta" else ():
                if name != "type":
                    blocks[event["index"]][name.replace("partial_json", "input")] += more
        for block in blocks:
            block |= {"input": json.loads(block["input"])} if "input" in block else {}
        return {**events[0]["message"], "content": blocks, **events[-2]["delta"], "usage": events[-2]["usage"]}
    message: Json = {"role": "assistant", "content": "", "refusal": None}
    logprobs: list[Json] = []
    calls: dict[int, Json] = {}
    for choice in (choice for event in events for choice in event["choices"]):
        for name in ("content", "reasoning", "reasoning_content"):
            if text := choice["delta"].get(name):
                message[name] = (message.get(name) or "") + text
        for call in choice["delta"].get("tool_calls", ()):
            index, function = call.pop("index"), call["function"]
            if index in calls:
                calls[index]["function"]["arguments"] += function["arguments"]
            else:
                calls[index] = call
        logprobs += (choice["logprobs"] or {"content": []})["content"]
        last = choice
    if calls:
        message |= {"content": message["content"] or None, "tool_calls": list(calls.values())}
    choice = {**last, "logprobs": {"content": logprobs, "refusal": None}, "message": message}
    del choice["delta"]
    return {**events[-1], "object": "chat.completion", "choices": [choice]}


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        own = ("id", "call_id", "created", "created_at", "completed_at")
        return {name: without_ids(each) for name, each in value.items() if name not in own}
    return value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", CALLS)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), reasoning=st.booleans(), stops=st.booleans())
def test_a_stream_says_what_a_whole_answer_says(
    kind: str, family: str, tokenizer: CheckpointTokenizer, data: st.DataObject, reasoning: bool, stops: bool
) -> None:
    reading = ChatReading(parsing_format(family), CallRules(ToolSet(TOOLS)), reasoning)
    said = data.draw(outputs(family))
    answer, deltas = answered(kind, tokenizer, reading, said, stops)
    for delta in deltas:
        answer.keep(0, delta)
    usage = {"stream_options": {"include_usage": True}} if kind == "chat" else {}
    stream, deltas = answered(kind, tokenizer, reading, said, stops, stream=True, **usage)
    parts = [stream.encode(stream.begin()), *(stream.encode_delta(0, delta) for delta in deltas)]
    lines = b"".join([*parts, stream.encode(stream.end())]).decode().split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    whole = json.loads(encode_json(answer.whole()))
    assert without_ids(put_together(kind, events)) == without_ids(whole)
    if kind != "messages":
        given_out = [token.token_id for delta in deltas for token in delta.tokens]
        before, end, _ = bytes(each for each in given_out if each < BOS).partition(b"</think>")
        details = whole["usage"]["completion_tokens_details" if kind == "chat" else "output_tokens_details"]
        reasoned = len(before + end) if end else len(given_out)
        assert details["reasoning_tokens"] == (reasoned if reasoning else 0)
