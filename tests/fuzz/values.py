"""Values that cost as much as they can, or that few programs expect."""

import random
from typing import Any

Json = dict[str, Any]


def raw(written: str) -> str:
    """A value that stands in a body as it is written here."""
    return f"@raw:{written}@"


FLOATS: list[Any] = [
    *(0, -1, 1, 0.0099, 100.1, 2.0001, 1e-7, 1e-38, 1e-45, 5e-324, 1e38, 1e308, -1e308),
    *(2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30),
    *map(raw, ("1e999", "-1e999", "NaN", "-0.0", "1" + "0" * 5000, "0." + "0" * 5000 + "1", "1e-" + "9" * 400)),
    *(True, "5", None, [], {}),
]
_PIECES = ["a", "é", "\ud800", "\udfff\ud800", "\u200b", "\u0301", "\0", "\ufeff", "\u202e"]
_PIECES += ["\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u0661", "\\", '"']
_PIECES += ["<tool_call>", "</think>", "<arg_key>", "<|user|>", "{{ x }}", "{% for %}", "</arg_value>", "\n", " "]


def log_uniform(rng: random.Random, most: int) -> int:
    """From 1 to `most`, as often small as large."""
    return int(most ** rng.random())


def text(rng: random.Random, characters: int) -> str:
    """One odd piece over and over, or a mixture of them."""
    if rng.random() < 0.5:
        piece = rng.choice(_PIECES)
        return piece * (1 + characters // len(piece))
    return "".join(rng.choices(_PIECES, k=1 + characters // 4))


def honest_schema(rng: random.Random) -> Json:
    """An object with arguments of many types, and definitions that some of them refer to."""
    properties: Json = {
        "city": {"type": "string", "description": "Where"},
        "days": {"type": "integer", "minimum": 0, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
        "place": {"$ref": "#/$defs/place"},
        "when": {"anyOf": [{"type": "string", "pattern": "^[0-9]{4}$"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    }
    kept = {name: value for name, value in properties.items() if rng.random() < 0.6}
    schema: Json = {"type": "object", "properties": kept, "required": [*kept][:2]}
    if "place" in kept:
        schema["$defs"] = {"place": {"type": "object", "properties": {"lat": {"type": "number"}}}}
    return schema


def grown_schema(rng: random.Random) -> Json:
    """A schema of which one dimension is large: references, definitions, properties, lists, depth, numbers."""
    union, count = rng.choice(["anyOf", "oneOf", "allOf"]), log_uniform(rng, 400)
    large = log_uniform(rng, 5000)

    def of(argument: Json, **definitions: Json) -> Json:
        return {"type": "object", "properties": {"city": argument}, "required": ["city"], "$defs": definitions}

    def reference(name: object) -> Json:
        return {"$ref": f"#/$defs/{name}"}

    def deep() -> Json:
        schema: Json = {"type": "string"}
        for _ in range(min(count, 300)):
            schema = rng.choice([{"items": schema}, {"properties": {"a": schema}}, {union: [schema]}])
        return schema

    def many() -> Json:
        return {
            "type": "object",
            "properties": {f"a{number}": {"type": "array"} for number in range(rng.randrange(500, 3000))},
            "$defs": {f"d{number}": {} for number in range(rng.randrange(2000, 5000))},
        }

    values: list[Any] = ["x" * large, 10**300, 1e308, None, {"a": ["b"] * count}]
    return rng.choice(
        [
            # A definition that refers to itself, and several that refer to each other.
            lambda: of(reference("d"), d={union: [reference("d")] * (1 + count)}),
            lambda: of(
                reference("d0"),
                **{
                    f"d{i}": {union: [reference(f"d{j}") for j in range(count % 30 + 2)]} for i in range(count % 30 + 2)
                },
            ),
            lambda: of(
                reference("d0"), **{f"d{i}": {union: [reference(f"d{i + 1}")] * (1 + count % 40)} for i in range(20)}
            ),
            # Many properties and many definitions.
            many,
            many,
            lambda: of(
                {"type": "array"}, **{f"d{number}": {"const": "x" * count} for number in range(min(large, 900))}
            ),
            # Long lists, names, references; depth; numbers.
            lambda: of({"enum": [str(number) for number in range(large)], "type": ["string", "null"] * count}),
            lambda: {"type": "object", "properties": {text(rng, large): {"type": "string"}}, "required": ["x"] * large},
            lambda: of({"$ref": "#/$defs" + rng.choice(["/d", "/~1~0", "/0", "/"]) * large}, d={}),
            lambda: of(deep()),
            lambda: of({"const": rng.choice(values), "minimum": -1e308, "multipleOf": 5e-324}),
            lambda: of({"type": "array", "minItems": 10**count, "maxItems": 10 ** (count % 20)}),
            lambda: of({"type": "string", "pattern": f"^(a{{0,{large}}}){{0,{large}}}$", "maxLength": 10**18}),
        ]
    )()
