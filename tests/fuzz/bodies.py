"""Honest bodies of which one thing is extreme. A seed and an index make one."""

import json
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.fuzz.honest import CHAT, CHOICES, COMPACT, COMPLETIONS, HONEST_BODIES, MESSAGES, RESPONSES, Draft
from tests.fuzz.values import FLOATS, Json, grown_schema, log_uniform, raw, text
from tests.gateway.world import VOCAB

_WEIGHTS = {
    CHAT: 10,
    COMPLETIONS: 6,
    RESPONSES: 4,
    MESSAGES: 4,
    COMPACT: 1,
    "/v1/responses/input_tokens": 1,
    "/v1/messages/count_tokens": 1,
    "/tokenize": 1,
    "/detokenize": 1,
}


@dataclass(frozen=True)
class Case:
    """A body, what is extreme in it, and what the model writes when it is asked."""

    path: str
    body: bytes
    extreme: str
    says: bytes
    tokens: int
    """Of all answers together, if log probabilities are asked for: the text is written over and over."""


def case(seed: int, index: int) -> Case:
    rng = random.Random(f"{seed}:{index}")
    draft = Draft(rng.choices([*_WEIGHTS], [*_WEIGHTS.values()])[0])
    HONEST_BODIES[draft.path](rng, draft)
    apply, weight = zip(*_EXTREMES.items(), strict=True)
    make: Callable[[random.Random, Draft], object] = rng.choices(apply, weight)[0]
    make(rng, draft)
    says = _said(rng, draft)
    data = _encoded(rng, draft.body)
    if make is _broken:
        data = _cut_or_flipped(rng, data)
    tokens = rng.choice([64, 512, 4096])
    return Case(draft.path, data, make.__name__.strip("_"), says, tokens)


def _encoded(rng: random.Random, body: Json) -> bytes:
    whole = json.dumps(body, ensure_ascii=rng.random() < 0.7, separators=(",", ":"))
    return re.sub('"@raw:([^@]*)@"', lambda found: found[1].replace("\\", ""), whole).encode(errors="surrogatepass")


def _nothing(rng: random.Random, draft: Draft) -> None:
    """All of it is as a client may well ask."""


def _broken(rng: random.Random, draft: Draft) -> None:
    """The bytes are spoilt once they are made."""


def _schema(rng: random.Random, draft: Draft) -> None:
    if not draft.schemas:
        _anything(rng, draft)
        return
    grown = rng.choice(draft.schemas)
    grown.clear()
    grown.update(grown_schema(rng))
    if draft.tools:
        wanted = rng.choice(["auto", "required", "required"])
        as_object = {"type": {"auto": "auto", "required": "any"}[wanted]}
        draft.body["tool_choice"] = as_object if draft.path.startswith(MESSAGES) else wanted
        draft.body.pop("allowed_token_ids", None)
    if draft.generates:
        draft.body["max_output_tokens" if draft.path == RESPONSES else "max_tokens"] = 4000


def _number(rng: random.Random, draft: Draft) -> None:
    names = [name for name in _NUMBERS if name in draft.body or draft.generates]
    if not names:
        _anything(rng, draft)
        return
    draft.body[rng.choice(names)] = rng.choice(FLOATS)


_SAMPLING = "temperature top_p top_k min_p seed frequency_penalty presence_penalty repetition_penalty"
_OTHERS = (
    "repetition_penalty min_tokens max_tokens n priority top_logprobs logprobs truncate_prompt_tokens prompt_logprobs"
)
_NUMBERS = f"{_SAMPLING} {_OTHERS}".split()


def _settings(rng: random.Random, draft: Draft) -> None:
    """Settings as large as they may be, with as many answers as there may be."""
    draft.ask(rng.choice([1, 8, CHOICES]))
    if draft.path == COMPLETIONS and rng.random() < 0.3:
        draft.body |= {"n": 1, "prompt": ["a"] * log_uniform(rng, 200)}
    words, biases, ids = log_uniform(rng, 700), log_uniform(rng, 1200), log_uniform(rng, 300_000)
    digits = log_uniform(rng, 6000)
    most = rng.choice([240, 300])
    bad_words = {"bad_words": [f"{number} " + rng.choice("aé") * log_uniform(rng, most) for number in range(words)]}
    large: list[Json] = [
        {"allowed_token_ids": [number % rng.choice([2, 256]) for number in range(ids)]},
        bad_words,
        bad_words,
        {"logit_bias": {str(number): 1.5 for number in range(biases)}},
        {"logit_bias": {"0" * number + "5": 1.5 for number in range(min(biases, 400))}},
        {"logit_bias": {rng.choice("5\u0661\u0662-+ _") * digits: 1.5}},
        {"stop": [rng.choice("aé\u200b") * log_uniform(rng, 256) + str(number) for number in range(16)]},
        {"stop_token_ids": [number % VOCAB for number in range(log_uniform(rng, 20))]},
        {"structured_outputs": {"choice": [str(number) * log_uniform(rng, 40) for number in range(words * 9)]}},
        {"structured_outputs": {"regex": f"(a{{1,{words}}}){{{biases}}}"}},
        {"structured_outputs": {"regex": "(a|b" * words + ")" * words}},
        {"structured_outputs": {"grammar": "start: " + "(" * words + "a" + ")" * words + "\na: " + '"b" ' * biases}},
        {"guided_json": {"type": "object", "description": "x" * ids}},
    ]
    draft.body |= rng.choice(large)


def _answers(rng: random.Random, draft: Draft) -> None:
    """Long answers with log probabilities, of many choices."""
    draft.ask(rng.choice([1, 8, CHOICES]))
    draft.body["max_tokens"] = rng.choice([64, 500, 4096])
    if draft.path == RESPONSES:
        draft.body |= {"top_logprobs": 20, "max_output_tokens": draft.body.pop("max_tokens")}
    elif draft.path == CHAT:
        draft.body |= {"logprobs": True, "top_logprobs": 20}
    elif draft.path == COMPLETIONS:
        draft.body["logprobs"] = rng.choice([0, 20])
        draft.body |= {"best_of": CHOICES} if rng.random() < 0.1 else {}
        draft.body |= {"prompt_logprobs": 20} if rng.random() < 0.2 else {}


def _prompt(rng: random.Random, draft: Draft) -> None:
    """A long one."""
    long = text(rng, log_uniform(rng, 120_000))
    name = next(name for name in ("messages", "prompt", "input", "tokens") if name in draft.body)
    if name == "messages":
        turns = draft.body[name][-1:] * log_uniform(rng, 4000)
        turns[-1] = turns[-1] | {"content": long}
        draft.body[name] = turns
    elif name == "tokens" or (name == "prompt" and rng.random() < 0.5):
        draft.body[name] = [rng.randrange(VOCAB) for _ in range(len(long))]
    else:
        draft.body[name] = long
    if draft.path == COMPLETIONS:
        draft.ask(rng.choice([1, CHOICES]))
        draft.body["echo"] = rng.random() < 0.3


def _many_tools(rng: random.Random, draft: Draft) -> None:
    if not draft.tools:
        _anything(rng, draft)
        return
    count, (first, *_) = log_uniform(rng, 600), draft.body["tools"]
    named = [json.dumps(first).replace("tool_0", f"tool_{'x' * rng.randrange(99)}_{n}") for n in range(count)]
    draft.body["tools"] += map(json.loads, named)


def _anything(rng: random.Random, draft: Draft) -> None:
    """Any value, wherever it stands."""
    places = list(_places(draft.body))
    container, key = rng.choice(places)
    value, count = container[key], log_uniform(rng, 60_000)
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('{"anyOf":[', "]}"), ('{"type":"text","a":', "}")])
    container[key] = rng.choice(
        [
            lambda: [rng.choice([0, "", None, [], {}, 0.5])] * count,
            lambda: {f"k{number}": rng.choice([0, "", None]) for number in range(min(count, 20_000))},
            lambda: raw(opening * count + "0" + closing * count),
            lambda: value * (1 + count % 3000) if isinstance(value, list | str) else [value] * count,
            lambda: {**value, text(rng, count): value} if isinstance(value, dict) else {text(rng, 20): value},
            lambda: text(rng, count),
            lambda: text(rng, 12),
            lambda: rng.choice(FLOATS),
            lambda: None,
        ]
    )()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Containers in a body, and each key or index in them."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in list(items):
        yield value, key
        if isinstance(inner, dict | list):
            yield from _places(inner)


_EXTREMES: dict[Callable[[random.Random, Draft], object], int] = {
    _nothing: 1,
    _broken: 1,
    _schema: 4,
    _number: 3,
    _settings: 4,
    _answers: 2,
    _prompt: 2,
    _many_tools: 1,
    _anything: 4,
}


def _cut_or_flipped(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return rng.choice(
        [
            data[:at],
            data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :],
            data[:at] + data[at // 2 :],
            data[:-1] + b"," + data[1:],
            b"\xef\xbb\xbf" + data,
            data.decode(errors="replace").encode("utf-16"),
            b"[" * log_uniform(rng, 500_000),
        ]
    )


def _said(rng: random.Random, draft: Draft) -> bytes:
    """Calls of the tools with the arguments that their schemas have, or text; now and then either is odd, too."""
    if not draft.tools or rng.random() < 0.1:
        return rng.choice(["so</think>Sunny.", '{"city": "Rome"}', text(rng, log_uniform(rng, 2000))]).encode(
            errors="replace"
        )
    calls = ""
    for name, schema in draft.tools.items():
        properties = schema.get("properties")
        keys = [*properties][:6] if isinstance(properties, dict) else ["city"]
        values = ["Rome", "3", '"x"', '{"a": [1, null]}', "true", text(rng, log_uniform(rng, 500))]
        arguments = (f"<arg_key>{key[:60]}</arg_key><arg_value>{rng.choice(values)}</arg_value>" for key in keys)
        calls += f"<tool_call>{name}{''.join(arguments)}</tool_call>"
    return ("</think>" + calls * (log_uniform(rng, 20) if rng.random() < 0.2 else 1)).encode(errors="replace")
