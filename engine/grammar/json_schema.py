"""JSON schemas as clients send them, made ready for llguidance."""

import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from engine.grammar import GrammarError

MAX_DEPTH = 64
"""Schemas within schemas."""
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
"""Formats of strings that are enforced. Not a set: what a client gives need not have a hash."""
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""What may stand between JSON's tokens. Bounded: a model that writes spaces for ever writes no answer."""

_EMBEDDED = re.compile(r"%json\s*(?=\{)")
_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)


def read_schema(text: str) -> dict[str, Any]:
    """Parse a schema. Formats that nothing enforces are left out: to JSON Schema they are annotations.

    Raises GrammarError if it is not a schema. What llguidance cannot enforce, it refuses later.
    """
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"the JSON schema is not JSON: {error}") from error
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError(f"a JSON schema is an object or true, found {json.dumps(schema)[:40]}")
    # The library's own options, which could switch checks off.
    schema.pop("x-guidance", None)
    _simplify(schema, "", 1)
    return schema


def with_options(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the options that llguidance reads from it."""
    return {"x-guidance": {"whitespace_pattern": WHITESPACE}, **schema}


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas directly within one: (JSON pointer from it, schema)."""
    for key in _MAPS:
        if isinstance(within := schema.get(key), dict):
            for name, value in within.items():
                if isinstance(value, dict):
                    yield f"/{key}/{_escape(name)}", value
    for key in _LISTS:
        if isinstance(within := schema.get(key), list):
            for index, value in enumerate(within):
                if isinstance(value, dict):
                    yield f"/{key}/{index}", value
    for key in _SINGLE:
        if isinstance(value := schema.get(key), dict):
            yield f"/{key}", value


def embedded_schemas(lark: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The JSON schemas that stand in a Lark grammar: (where it begins, where it ends, schema as `read_schema` has it).

    Raises GrammarError for one that is nested too deep.
    """
    decoder, end = json.JSONDecoder(), 0
    for match in _EMBEDDED.finditer(lark):
        if match.end() < end:
            continue
        try:
            schema, end = decoder.raw_decode(lark, match.end())
        except (ValueError, RecursionError):
            # llguidance says what is wrong.
            continue
        _simplify(schema, str(schema.get("$comment", "")), 1)
        yield match.end(), end, schema


def _simplify(schema: dict[str, Any], pointer: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise GrammarError(f"the JSON schema is nested more than {MAX_DEPTH} deep at {pointer[:200]}")
    if "format" in schema and schema["format"] not in FORMATS:
        del schema["format"]
    for step, within in subschemas(schema):
        _simplify(within, pointer + step, depth + 1)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
