"""What a parser asks of a request's tools: their names, and what their JSON schemas say of an argument."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.formats.protocol import Tool

_TYPES = {"string", "number", "boolean", "null", "array", "object"}
_MAX_DEPTH = 16
"""Of references and unions in a schema. What lies deeper counts as unknown."""


class ToolSet:
    """The tools of a request by their names. Schemas are the client's, so anything may be in them."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._parameters: dict[str, Mapping[str, Any]] = {}
        for tool in tools:
            function = tool["function"]
            parameters = function.get("parameters")
            self._parameters[function["name"]] = parameters if isinstance(parameters, Mapping) else {}

    def __bool__(self) -> bool:
        return bool(self._parameters)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parameters)

    def parameters(self, name: str) -> Mapping[str, Any]:
        """The JSON schema of a tool's arguments; {} if it has none."""
        return self._parameters[name]

    def properties(self, name: str) -> dict[str, Mapping[str, Any]]:
        """The schema of each named argument, required ones that have no schema included."""
        declared = self._parameters[name].get("properties")
        found = dict(declared) if isinstance(declared, Mapping) else {}
        named = {key: schema if isinstance(schema, Mapping) else {} for key, schema in found.items()}
        return {**named, **{key: {} for key in self.required(name) if key not in named}}

    def required(self, name: str) -> tuple[str, ...]:
        declared = self._parameters[name].get("required")
        return tuple(key for key in declared if isinstance(key, str)) if isinstance(declared, list) else ()

    def types(self, name: str, key: str) -> frozenset[str] | None:
        """The JSON types that an argument may have ("number" stands for "integer", too); None: the schema is silent."""
        root = self._parameters[name]
        return _types(self.properties(name).get(key), root, _MAX_DEPTH)


def json_type(value: object) -> str:
    """The JSON type of a value that `json.loads` made."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "number"
    return "array" if isinstance(value, list) else "object"


def parse_json(text: str) -> Any:
    """As `json.loads`, but strict: no NaN, no Infinity. Raises ValueError, for too deep a nesting as well."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _types(schema: object, root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
    """The types that every part of the schema allows; None if no part says anything."""
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    allowed = [_of_type(schema), _of_values(schema)]
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        allowed.append(_types(_resolve(reference, root), root, depth - 1))
    for union in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(union, list) and union:
            branches = [_types(branch, root, depth - 1) for branch in union]
            known = [branch for branch in branches if branch is not None]
            allowed.append(frozenset().union(*known) if len(known) == len(branches) else None)
    if isinstance(schema.get("allOf"), list):
        allowed.extend(_types(branch, root, depth - 1) for branch in schema["allOf"])
    found = [types for types in allowed if types is not None]
    return frozenset.intersection(*found) if found else None


def _of_type(schema: Mapping[str, Any]) -> frozenset[str] | None:
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared
    if not isinstance(names, list):
        return None
    types = {"number" if name == "integer" else name for name in names if isinstance(name, str)} & _TYPES
    if schema.get("nullable") is True:
        types.add("null")
    return frozenset(types) or None


def _of_values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return frozenset(map(json_type, values)) if isinstance(values, list) and values else None


def _resolve(reference: str, root: Mapping[str, Any]) -> object:
    target: object = root
    for part in reference[2:].split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target
