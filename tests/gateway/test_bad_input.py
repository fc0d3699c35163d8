"""Requests with wrong values: each gets an answer that names the value, and costs no decode node anything."""

from typing import Any

import pytest

from control.messages import MAX_ALLOWED, MAX_BAD_WORD_TOKENS
from tests.gateway.nodes import CONTEXT
from tests.gateway.world import VOCAB, WEATHER, World

MESSAGES = [{"role": "user", "content": "hi"}]
LONG = CONTEXT + 1
BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "Field required"),
    ({"prompt": ""}, "prompt", "empty prompt"),
    ({"prompt": []}, "prompt", "empty prompt"),
    ({"prompt": [1, True]}, "prompt", "integer token ids"),
    ({"prompt": [1, 2.0]}, "prompt", "integer token ids"),
    ({"prompt": {"a": 1}}, "prompt", "integer token ids"),
    ({"prompt": [1, VOCAB]}, "prompt", f"0 to {VOCAB - 1}, found {VOCAB} at position 1"),
    ({"prompt": [-1]}, "prompt", "found -1"),
    (
        {"prompt": "a" * LONG},
        "prompt",
        f"This model's maximum context length is {CONTEXT} tokens. However, the prompt has {LONG}",
    ),
    ({"prompt": "a", "max_tokens": CONTEXT}, "max_tokens", f"However, {LONG} were requested (1 in the prompt"),
    ({"prompt": "a", "max_tokens": 0}, "", "expected at least 1, or echo with 0"),
    ({"prompt": "a", "max_tokens": -5}, "max_tokens", "greater than or equal to 0"),
    ({"prompt": "a", "max_tokens": 10**30}, "max_tokens", "10000 were requested"[-14:]),
    ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "valid integer, found '5'"),
    ({"prompt": "a", "max_tokens": True}, "max_tokens", "valid integer"),
    ({"prompt": "a", "max_tokens": 5.5}, "max_tokens", "valid integer"),
    ({"prompt": "a", "temperature": 2.5}, "temperature", "less than or equal to 2"),
    ({"prompt": "a", "temperature": "hot"}, "temperature", "valid number"),
    ({"prompt": "a", "top_p": 0}, "top_p", "greater than 0"),
    ({"prompt": "a", "top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"prompt": "a", "seed": 2**63}, "seed", "less than"),
    ({"prompt": ["a", ""]}, "prompt", "empty prompt"),
    ({"prompt": [1, "b"]}, "prompt", "list of such prompts"),
    ({"prompt": ["a", "b"], "n": 65}, "", "at most 128 answers"),
    ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ({"prompt": "a", "n": 0}, "n", "greater than or equal to 1"),
    ({"prompt": "a", "n": True}, "n", "valid integer"),
    ({"prompt": "a", "n": 129}, "n", "less than or equal to 128"),
    ({"prompt": "a", "n": 3, "best_of": 2}, "", "at least n"),
    ({"prompt": "a", "best_of": 2, "stream": True}, "", "cannot be streamed"),
    ({"prompt": "a", "presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
    ({"prompt": "a", "repetition_penalty": 1e-45}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"prompt": "a", "min_p": 1.5}, "min_p", "less than or equal to 1"),
    ({"prompt": "a", "logit_bias": {"1": 101}}, "logit_bias.1", "less than or equal to 100"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "expected token ids from 0"),
    ({"prompt": "a", "logit_bias": {"1" * 5000: 1}}, "logit_bias", "expected token ids from 0"),
    ({"prompt": "a", "logit_bias": {str(VOCAB): 1}}, "logit_bias", f"0 to {VOCAB - 1}, found"),
    ({"prompt": "a", "allowed_token_ids": []}, "allowed_token_ids", "at least 1"),
    ({"prompt": "a", "allowed_token_ids": [VOCAB]}, "allowed_token_ids", f"found {VOCAB}"),
    ({"prompt": "a", "allowed_token_ids": [1] * (MAX_ALLOWED + 1)}, "allowed_token_ids", f"at most {MAX_ALLOWED}"),
    ({"prompt": "a", "bad_words": [""]}, "bad_words.0", "at least 1"),
    ({"prompt": "a", "bad_words": ["a" * 256] * 8}, "bad_words", f"at most {MAX_BAD_WORD_TOKENS} tokens"),
    ({"prompt": "a", "min_tokens": 5, "max_tokens": 4}, "min_tokens", "at most max_tokens, 4"),
    ({"prompt": "a", "truncate_prompt_tokens": 0}, "prompt", "no tokens"),
    ({"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    ({"prompt": "a", "priority": "high"}, "priority", "valid integer"),
    ({"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
    ({"prompt": "a", "prompt_logprobs": 0, "stream": True}, "", "not supported when stream is true"),
    ({"prompt": "a", "add_special_tokens": False}, "add_special_tokens", "not supported"),
    ({"prompt": "a", "stop_token_ids": [1.5]}, "stop_token_ids.0", "valid integer"),
    ({"prompt": "a", "stop": ["x"] * 17}, "stop", "at most 16 items"),
    ({"prompt": "a", "stop": ["x" * 257]}, "stop.0", "at most 256 characters"),
    ({"prompt": "a", "stop": [""]}, "stop.0", "at least 1 character"),
    ({"prompt": "a", "stop": 3}, "stop", "string or a list of strings"),
    ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"prompt": "a", "stream": "yes"}, "stream", "valid boolean"),
    ({"prompt": "a", "stream_options": {"include_usage": True}}, "", "only allowed when stream is true"),
    ({"prompt": "a", "response_format": {"type": "json_schema"}}, "", "json_schema.schema"),
    ({"prompt": "a", "response_format": {"type": "xml"}}, "", "'text'"),
    ({"prompt": "a", "response_format": {"type": "json_object"}, "guided_regex": "a"}, "", "expected one of them"),
    ({"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["b"]}}, "", "expected one of them"),
    ({"prompt": "a", "structured_outputs": {"choice": []}}, "", "at least 1"),
    ({"prompt": "a", "guided_regex": "a" * 2**16}, "", "at most"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "hi"}, "messages", "valid array"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages.0.role", "'system', 'developer'"),
    ({"messages": [{"role": "tool", "content": "hi"}]}, "messages", "no tools"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content", "'image_url'"),
    ({"messages": [{"role": "user", "content": {}}]}, "messages.0.content", "expected a string or a list of parts"),
    ({"messages": [{"role": "user", "content": 0}]}, "messages.0.content", "expected a string or a list of parts"),
    ({"function_call": {"name": "f"}}, "function_call", "not supported"),
    ({"include_reasoning": False}, "include_reasoning", "not supported"),
    ({"separate_reasoning": False}, "separate_reasoning", "not supported"),
    ({"continue_final_message": True}, "messages", "expected an assistant's message without tool calls at the end"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "", "continue_final_message: not together"),
    ({"chat_template_kwargs": {"x": [1]}}, "chat_template_kwargs", "valid"),
    ({"chat_template_kwargs": {"__x": 1}}, "chat_template_kwargs", "match pattern"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "cannot be set"),
    ({"chat_template_kwargs": {"bos_token": ""}}, "chat_template_kwargs", "cannot be set"),
    ({"top_logprobs": 3}, "", "only allowed when logprobs is true"),
    ({"logprobs": 3}, "logprobs", "valid boolean"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    ({"tools": [{"type": "function"}]}, "tools.0.function", "Field required"),
    ({"tools": [{"type": "retrieval"}]}, "tools.0.type", "'function'"),
    ({"tools": [WEATHER, WEATHER]}, "", "each name once"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
    ({"tool_choice": "required"}, "", "expected one of the tools"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "", "one of the tools"),
    ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice", "'none'"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "'allowed_tools'"),
    ({"guided_json": 5}, "guided_json", "guided_json: Input should be an object, found 5"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json", "should be an object, found 5"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages.0.tool_calls.0.function",
        "required",
    ),
    ({"reasoning_effort": "much"}, "reasoning_effort", "'none'"),
]
BAD_TOKENS: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/chat/completions", {}, "messages", "Field required"),
    ("/tokenize", {}, "", "prompt: expected either prompt or messages"),
    ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "", "prompt: expected either prompt or messages"),
    ("/tokenize", {"prompt": 3}, "prompt", "Input should be a valid string, found 3"),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, "", "continue_final_message: expected messages"),
    ("/detokenize", {}, "tokens", "Field required"),
    ("/detokenize", {"tokens": [1, 258]}, "tokens", "expected token ids from 0 to 257, found 258 at position 1"),
    ("/detokenize", {"tokens": [-1]}, "tokens.0", ""),
    ("/detokenize", {"tokens": [1 << 80]}, "tokens.0", ""),
]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        *(("/v1/completions", *case) for case in BAD_COMPLETIONS),
        *(("/v1/chat/completions", {"messages": MESSAGES, **body}, *said) for body, *said in BAD_CHATS),
        *BAD_TOKENS,
    ],
)
def test_bad_input_gets_a_clear_answer(world: World, path: str, body: dict[str, Any], param: str, message: str) -> None:
    world.decode.reset()
    answer = world.http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert (error["param"] or "").startswith(param)
    assert message in error["message"]
    assert not world.decode.generated


def test_an_error_repeats_only_the_beginning_of_a_long_name(world: World) -> None:
    answer = world.http.post("/v1/completions", json={"prompt": "a", "logit_bias": {"5" * 5000: "x"}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == f"logit_bias.{'5' * 77}..."
    assert len(answer.text) < 500


def test_an_error_repeats_only_the_beginning_of_a_long_type(world: World) -> None:
    message = {"role": "user", "content": [{"type": "x" * 5000, "text": "a"}]}
    answer = world.http.post("/v1/chat/completions", json={"messages": [message]})
    assert answer.status_code == 400
    assert "expected a string or a list of parts of type 'text'" in answer.text
    assert len(answer.text) < 500


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}', b"[" * 10**5]
)
def test_bodies_that_are_no_request(world: World, body: bytes) -> None:
    answer = world.http.post("/v1/completions", content=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
