"""Honest messages, made from the types that the wire has."""

import itertools
import random
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from control.messages.common import ADDRESS_PATTERN
from tests.fuzz.values import Json

Known = Mapping[str, Callable[[random.Random], Any]]
"""By name of a field, or of its class and itself: values that mean something to the node."""
_SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'


def honest(kind: type[BaseModel], rng: random.Random, known: Known) -> Json:
    """A message, or a piece of one, with each required field, and some of the others."""
    fields = kind.model_fields.items()
    return {
        name: _field(kind.__name__, name, Annotated[field.annotation, field], rng, known)
        for name, field in fields
        if field.is_required() or name == "kind" or rng.random() < 0.4
    }


def _field(owner: str, name: str, kind: Any, rng: random.Random, known: Known) -> Any:
    if (make := known.get(f"{owner}.{name}") or known.get(name)) is not None:
        # What is known changes, and what comes after must not depend on that.
        return make(random.Random(rng.random()))
    return _value(kind, rng, known)


def _value(kind: Any, rng: random.Random, known: Known, limits: Mapping[str, Any] = types.MappingProxyType({})) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    of = partial(_value, rng=rng, known=known)
    if origin is Annotated:
        return _value(arguments[0], rng, known, {**limits, **_limits_in(arguments[1:])})
    if origin is Literal:
        return rng.choice(arguments)
    if origin in (Union, types.UnionType):
        return of(rng.choice(arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return [of(each) for each in arguments]
    if origin is tuple:
        least = limits.get("min_length", 0)
        return [of(arguments[0]) for _ in range(rng.randrange(least, least + 3))]
    if origin is dict:
        return {of(arguments[0]): of(arguments[1]) for _ in range(rng.randrange(3))}
    if issubclass(kind, BaseModel):
        return honest(kind, rng, known)
    if issubclass(kind, tuple):
        hints = get_type_hints(kind, include_extras=True)
        return [_field(kind.__name__, name, hint, rng, known) for name, hint in hints.items()]
    return _scalar(kind, rng, limits)


def _scalar(kind: Any, rng: random.Random, limits: Mapping[str, Any]) -> Any:
    least, most = limits.get("ge", limits.get("gt", 0)), limits.get("le", limits.get("lt", 10**6))
    if kind is bool:
        return rng.random() < 0.5
    if kind is int:
        return rng.randint(least, min(most - 1, max(least, 0) + 50)) if rng.random() < 0.9 else rng.randint(least, most)
    if kind is float:
        return rng.uniform(least + 1e-3, most)
    if kind is bytes:
        return bytes(4 * rng.randrange(3))
    if kind is str:
        if pattern := limits.get("pattern"):
            return "127.0.0.1:9" if pattern == ADDRESS_PATTERN else ""
        return rng.choice(["a", "abc", "x y"])
    if kind is types.NoneType:
        return None
    raise TypeError(f"no values for {kind}")


def _limits_in(metadata: tuple[Any, ...]) -> Json:
    single = [each for part in metadata for each in getattr(part, "metadata", [part])]
    names = ("ge", "gt", "le", "lt", "min_length", "max_length", "pattern")
    return {name: value for each in single for name in names if (value := getattr(each, name, None)) is not None}


def known_values(
    address: str, prompts: Callable[[], list[list[int]]], attempts: Callable[[], list[Any]]
) -> dict[str, Any]:
    """What hostile processes know. address: of their gateway. prompts: of the honest client. attempts: under way."""

    ids = itertools.count(100)

    def generated(rng: random.Random) -> list[int]:
        return [rng.randrange(256) for _ in range(rng.choice([0, 0, 0, 5]))]

    def columns(rng: random.Random) -> Json:
        count = rng.choice([0, 0, 1, 300])
        return {name: [rng.randrange(3)] * count for name in ("buffers", "starts", "stops", "digests")}

    return {
        "request_id": lambda rng: f"h{next(ids) - (rng.randrange(50) if rng.random() < 0.2 else 0)}",
        "attempt": lambda rng: rng.choice([*attempts(), ["boot", "request", 1]]),
        "attempts": lambda rng: attempts()[:5],
        "via": lambda rng: address,
        "address": lambda rng: "127.0.0.1:9",
        "prompt_ids": lambda rng: rng.choice(prompts())[: rng.choice([1, 66, 130, 500])],
        "max_new_tokens": lambda rng: rng.randrange(6, 30),
        "generated": generated,
        "group": lambda rng: rng.choice(["", "g0", "g1"]),
        "cache_salt": lambda rng: "",
        "prefill_nodes": lambda rng: [],
        "HeartbeatAck.leaving": lambda rng: [],
        "PromptLogprobs.start": lambda rng: rng.randrange(1, 9),
        "alternatives": lambda rng: 1,
        "ints": lambda rng: bytes(8),
        "floats": lambda rng: bytes(8),
        "priority": lambda rng: rng.randrange(-5, 5),
        "stop_token_ids": lambda rng: [3][: rng.randrange(2)],
        "min_tokens": lambda rng: rng.randrange(4),
        "top_k": lambda rng: rng.randrange(9),
        "schema_text": lambda rng: _SCHEMA,
        "checksums": columns,
        "start": lambda rng: rng.randrange(3),
        "stop": lambda rng: rng.randrange(3, 70),
        "chunks": lambda rng: rng.randrange(2),
        "number": lambda rng: rng.randrange(2),
        "token_id": lambda rng: rng.randrange(256),
    }
