"""What is written under the masks of a JSON schema satisfies it."""

import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from decimal import Context, Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import numpy as np
import pytest

from control.grammar import MAX_TEXT, JsonSchema
from engine.grammar import GrammarError
from tests.engine.grammar.small import compiled, decode, write
from tests.skips import impossible

_SUITE = "jsonschema==4.26.0"
"""Its source distribution has the JSON Schema Test Suite."""
_KUBERNETES = "v1.37.0-local"

OWN: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": False},
    {"type": "object", "additionalProperties": {"type": "number"}, "maxProperties": 3},
    {"type": "object", "patternProperties": {"^x_": {"type": "null"}}, "additionalProperties": False},
    {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 5}, "minItems": 2, "maxItems": 4},
    {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}], "items": False},
    {"type": "string", "minLength": 3, "maxLength": 6},
    {"type": "string", "pattern": "^[a-f0-9]{8}$"},
    {"type": "string", "enum": ["red", "green", 'a "quoted"', "☃"]},
    *({"type": "string", "format": name} for name in ("date", "time", "date-time", "ipv4", "uuid", "duration")),
    {"const": {"a": [1, None, "x"]}},
    {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 100},
    {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "integer"}, {"type": "null"}]},
    {"allOf": [{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"required": ["a"]}]},
    {"oneOf": [{"type": "string", "maxLength": 4}, {"type": "boolean"}]},
    {"type": ["integer", "null"], "minimum": 3},
    {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer"},
                    "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["v", "next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
    {
        "title": "Call",
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where", "maxLength": 12},
            "unit": {"enum": ["celsius", "fahrenheit"], "default": "celsius"},
            "days": {"type": "array", "items": {"enum": ["mo", "tu", "we"]}, "maxItems": 3},
            "near": {"type": "object", "properties": {"lat": {"type": "number"}}, "required": ["lat"]},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
]


def number(text: str) -> Decimal | float:
    """As it is written, since in floats 0.1021 is no multiple of 0.0001, but for exponents beyond decimals'."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def tried(schema: object, rng: np.random.Generator, most: int) -> str:
    """What becomes of a schema: refused, cut off, whole. Raises an error if the answer does not satisfy it."""
    try:
        grammar = compiled(JsonSchema(schema_text=json.dumps(schema)))
    except GrammarError:
        return "refused"
    tokens, is_whole = write(grammar.start(), rng, most)
    if not is_whole:
        return "cut off"
    exact, answer = (json.loads(text, parse_float=number) for text in (json.dumps(schema), decode(tokens)))
    with localcontext(Context(prec=1000)):
        jsonschema.Draft202012Validator(exact).validate(answer)
    return "whole"


@pytest.mark.parametrize("number", range(len(OWN)))
def test_answers_satisfy_our_schemas(number: int) -> None:
    rng = np.random.default_rng(number)
    results = Counter(tried(OWN[number], rng, 400) for _ in range(4))
    assert results["refused"] == 0
    assert results["whole"] >= 1


def suite(directory: Path) -> Iterator[object]:
    """The schemas of the JSON Schema Test Suite, draft 2020-12."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "jsonschema", _SUITE]
    if subprocess.run([*command, "-d", str(directory)], check=False, capture_output=True).returncode:
        pytest.skip(impossible(f"{_SUITE} cannot be downloaded"))
    with tarfile.open(next(directory.glob("*.tar.gz"))) as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            if folder.endswith("json/tests/draft2020-12") and name.endswith(".json"):
                content = archive.extractfile(member)
                assert content is not None
                yield from (group["schema"] for group in json.load(content))


def kubernetes() -> Iterator[dict[str, Any]]:
    """The schemas of Kubernetes' API, each with the definitions that it refers to."""
    directory = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema" / _KUBERNETES
    definitions: dict[str, Any] = json.loads((directory / "_definitions.json").read_text())["$defs"]
    for path in sorted(directory.glob("[!_]*.json")):
        schema = json.loads(path.read_text())
        needed: dict[str, Any] = {}
        waiting = [schema]
        while waiting:
            for name in references(waiting.pop()):
                if name in definitions and name not in needed:
                    needed[name] = definitions[name]
                    waiting.append(definitions[name])
        text = json.dumps({**schema, "$defs": needed}).replace("/api/_definitions.json#", "#")
        if len(text) <= MAX_TEXT:
            yield json.loads(text)


def references(value: object) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(target := value.get("$ref"), str):
            yield target.rpartition("/")[2]
        for within in value.values():
            yield from references(within)
    elif isinstance(value, list):
        for within in value:
            yield from references(within)


@pytest.mark.slow
def test_answers_satisfy_public_schemas(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    schemas = [*suite(tmp_path), *list(kubernetes())[::2]]
    assert len(schemas) >= 500
    results = Counter(tried(schema, rng, 600) for schema in schemas)
    assert results["whole"] + results["cut off"] >= 400, results
    assert results["whole"] >= 300, results
