"""Honest bodies for every endpoint that takes one: rich, and valid."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.requests.response_input import encoded_summary
from tests.fuzz.values import Json, honest_schema
from tests.gateway.world import MODEL, VOCAB

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
COMPACT = "/v1/responses/compact"
CHOICES = 128
"""The most answers that a body may ask for."""


@dataclass
class Draft:
    """A body that grows. schemas: the JSON schemas in it. tools: by name, those of tools."""

    path: str
    body: Json = field(default_factory=dict)
    schemas: list[Json] = field(default_factory=list)
    tools: dict[str, Json] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        return self.path in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)

    def ask(self, choices: int) -> None:
        """Where several answers may be asked for."""
        if self.path in (CHAT, COMPLETIONS):
            self.body["n"] = choices

    def schema(self, rng: random.Random) -> Json:
        self.schemas.append(honest_schema(rng))
        return self.schemas[-1]


def _sampling(rng: random.Random) -> Json:
    """Some of the fields that all endpoints take which generate."""
    fields: Json = {
        "temperature": rng.uniform(0, 2),
        "top_p": rng.uniform(0.1, 1),
        "top_k": rng.randrange(-1, 50),
        "min_p": rng.random(),
        "seed": rng.randrange(2**40),
        "frequency_penalty": rng.uniform(-2, 2),
        "presence_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.1, 3),
        "logit_bias": {str(rng.randrange(VOCAB)): rng.uniform(-100, 100) for _ in range(rng.randrange(9))},
        "allowed_token_ids": [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 99))],
        "bad_words": ["bad", "worse words", "é"][: rng.randrange(4)],
        "stop": ["\n\n\n", "STOP"][: rng.randrange(3)],
        "stop_token_ids": [3, 4][: rng.randrange(3)],
        "ignore_eos": rng.random() < 0.5,
        "min_tokens": rng.randrange(8),
        "skip_special_tokens": rng.random() < 0.5,
        "priority": rng.randrange(9),
        "cache_salt": "salt",
    }
    return {name: value for name, value in fields.items() if rng.random() < 0.2}


def _structure(rng: random.Random, draft: Draft) -> Json:
    """What the text has to look like, in one of many ways, or in none."""
    ways: list[Callable[[], Json]] = [
        lambda: {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": draft.schema(rng)}}},
        lambda: {"response_format": {"type": "json_object"}},
        lambda: {"structured_outputs": {"json": draft.schema(rng)}},
        lambda: {"structured_outputs": {"regex": "[a-z]{1,9}( [0-9]+)?"}},
        lambda: {"structured_outputs": {"choice": ["yes", "no"]}},
        lambda: {"structured_outputs": {"grammar": 'start: "a"+ | /b{2,9}/'}},
        lambda: {"guided_json": draft.schema(rng)},
        lambda: {"guided_choice": ["yes", "no"]},
    ]
    return rng.choice(ways)() if rng.random() < 0.3 else {}


def _several(rng: random.Random) -> Json:
    fields = {"n": rng.randrange(1, 5), "stream": rng.random() < 0.5, "return_token_ids": True}
    return {name: value for name, value in fields.items() if rng.random() < 0.3}


def _tools(rng: random.Random, draft: Draft, forms: Callable[[str, Json], Json]) -> list[Json]:
    for number in range(rng.randrange(1, 4)):
        draft.tools[f"tool_{number}"] = draft.schema(rng)
    return [forms(name, schema) for name, schema in draft.tools.items()]


def _chat(rng: random.Random, draft: Draft) -> None:
    _tokenize_chat(rng, draft)
    draft.body |= {"max_tokens": rng.choice([20, 200, 4000]), **_sampling(rng), **_several(rng)}
    draft.body |= {} if draft.tools else _structure(rng, draft)
    if rng.random() < 0.3:
        draft.body |= {"logprobs": True, "top_logprobs": rng.randrange(21)}
    if draft.tools:
        named = {"type": "function", "function": {"name": "tool_0"}}
        draft.body["tool_choice"] = rng.choice(["auto", "auto", "required", named, "none"])


def _tokenize_chat(rng: random.Random, draft: Draft) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "tool_0", "arguments": '{"city": "Rome", "days": 3}'}}
    earlier = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How is it in Rome?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "so"},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    draft.body["messages"] = [*earlier[: rng.choice([0, 1, 4])], {"role": "user", "content": "And in Oslo?"}]
    if rng.random() < 0.7:
        draft.body["tools"] = _tools(
            rng, draft, lambda name, schema: {"type": "function", "function": {"name": name, "parameters": schema}}
        )
        if rng.random() < 0.2:
            draft.body["tools"][0]["function"]["strict"] = True
    if rng.random() < 0.2:
        draft.body["chat_template_kwargs"] = {"enable_thinking": rng.random() < 0.5, "depth": 3}


def _completions(rng: random.Random, draft: Draft) -> None:
    prompts = ["Once upon", [97, 98, 99], ["one", "two"], [[97], [98, 99]]]
    draft.body |= {"prompt": rng.choice(prompts), "max_tokens": rng.choice([20, 200, 4000])}
    draft.body |= {**_sampling(rng), **_several(rng), **_structure(rng, draft)}
    if rng.random() < 0.3:
        draft.body |= {"logprobs": rng.randrange(21), "echo": rng.random() < 0.5}


def _responses(rng: random.Random, draft: Draft) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "tool_0", "arguments": '{"city": "Rome"}'}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How is it in Rome?"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
        call,
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {"type": "compaction", "encrypted_content": encoded_summary("It is sunny in Rome.")},
    ]
    draft.body |= {"input": rng.choice(["hello", items]), "instructions": "Be brief.", **_sampling(rng)}
    if draft.path == COMPACT:
        draft.body["model"] = MODEL
        return
    draft.body |= {"max_output_tokens": rng.choice([20, 200, 4000]), "stream": rng.random() < 0.4}
    draft.body |= rng.choice([{}, {"metadata": {"a": "b"}}, {"top_logprobs": 20}, {"truncation": "auto"}])
    if rng.random() < 0.6:
        form = {"type": "function", "description": "what it does"}
        draft.body["tools"] = _tools(rng, draft, lambda name, schema: form | {"name": name, "parameters": schema})
        draft.body["tool_choice"] = rng.choice(["auto", "required", {"type": "function", "name": "tool_0"}])
    elif rng.random() < 0.4:
        draft.body["text"] = {"format": {"type": "json_schema", "name": "a", "schema": draft.schema(rng)}}


def _messages(rng: random.Random, draft: Draft) -> None:
    turns: list[Json] = [
        {"role": "user", "content": [{"type": "text", "text": "How is it in Rome?"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "so"},
                {"type": "tool_use", "id": "c", "name": "tool_0", "input": {"city": "Rome"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "sunny"}]},
    ]
    draft.body |= {"messages": turns[: rng.choice([1, 3])], "system": "Be brief."}
    if draft.generates:
        draft.body |= {"max_tokens": rng.choice([20, 200, 4000]), "stream": rng.random() < 0.4, **_sampling(rng)}
        draft.body["stop_sequences"] = draft.body.pop("stop", [])
    if rng.random() < 0.6:
        draft.body["tools"] = _tools(rng, draft, lambda name, schema: {"name": name, "input_schema": schema})
        draft.body["tool_choice"] = rng.choice([{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "tool_0"}])


def _tokenize(rng: random.Random, draft: Draft) -> None:
    if rng.random() < 0.5:
        _tokenize_chat(rng, draft)
    else:
        draft.body["prompt"] = "Once upon a time"
    draft.body["return_token_strs"] = True


def _detokenize(rng: random.Random, draft: Draft) -> None:
    draft.body["tokens"] = [rng.randrange(VOCAB) for _ in range(20)]


HONEST_BODIES: dict[str, Callable[[random.Random, Draft], None]] = {
    CHAT: _chat,
    COMPLETIONS: _completions,
    RESPONSES: _responses,
    MESSAGES: _messages,
    COMPACT: _responses,
    "/v1/responses/input_tokens": _responses,
    "/v1/messages/count_tokens": _messages,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}
