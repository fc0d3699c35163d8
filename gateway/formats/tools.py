"""The tools of a request: which calls an answer may have, and what the tools' JSON schemas say of an argument."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Tool: TypeAlias = Mapping[str, Any]
"""{"type": "function", "function": {"name", "description"?, "parameters"?: JSON schema, "strict"?}}."""
MAX_STEPS = 2**13
"""Sub-schemas, and elements of their lists, that one `ToolSet` looks at for types: some 15 ms of work."""
_MAX_DEPTH = 16
"""Of references and unions in a schema, and of names in a reference. What lies deeper counts as unknown."""
_TYPES = {"string", "number", "boolean", "null", "array", "object"}
_TYPE_NAMES = {bool: "boolean", str: "string", int: "number", float: "number", list: "array", dict: "object"}
_LISTS = ("type", "enum", "anyOf", "oneOf", "allOf")


class ToolSet:
    """The tools of a request by name. Schemas may hold anything, and are read once. One thread uses it at a time."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        functions = [tool["function"] for tool in tools]
        self._signatures = {function["name"]: _signature(function.get("parameters")) for function in functions}
        self.names = tuple(self._signatures)
        self._known: dict[tuple[int, int], frozenset[str] | None] = {}
        """JSON types, by the identities of the root and of the sub-schema, both of which the tools keep alive."""
        self._steps = MAX_STEPS

    def __bool__(self) -> bool:
        return bool(self.names)

    def __getitem__(self, name: str) -> "ToolSignature":
        return self._signatures[name]

    def types(self, name: str, key: str) -> frozenset[str] | None:
        """The JSON types that an argument may have ("number" stands for "integer", too); None: the schema is silent."""
        return self._types_of(self[name].properties.get(key), self[name].parameters)

    def _types_of(self, schema: object, root: Mapping[str, Any], depth: int = _MAX_DEPTH) -> frozenset[str] | None:
        """The types that every part of the schema allows; None if no part says anything.

        A sub-schema that refers to itself says nothing there, nor does what is beyond the bounds.
        """
        if not isinstance(schema, Mapping) or depth == 0:
            return None
        key = id(root), id(schema)
        if key not in self._known:
            self._known[key] = None
            self._known[key] = self._read(schema, root, depth - 1)
        return self._known[key]

    def _read(self, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int) -> frozenset[str] | None:
        lists = {name: value for name in _LISTS if isinstance(value := schema.get(name), list)}
        steps = 1 + sum(map(len, lists.values()))
        if steps > self._steps:
            return None
        self._steps -= steps
        allowed = [_of_type(schema), _of_values(schema)]
        allowed.append(self._types_of(_referred(schema, root), root, depth))
        for union in filter(None, (lists.get("anyOf"), lists.get("oneOf"))):
            branches = [self._types_of(branch, root, depth) for branch in union]
            known = [branch for branch in branches if branch is not None]
            allowed.append(frozenset().union(*known) if len(known) == len(branches) else None)
        allowed.extend(self._types_of(branch, root, depth) for branch in lists.get("allOf", ()))
        found = [types for types in allowed if types is not None]
        return frozenset.intersection(*found) if found else None


@dataclass(frozen=True)
class CallRules:
    """Which calls an answer may have, for every format and endpoint: its grammar and its parser are made of this.

    tools: those that may be called. forced: the answer is nothing but calls, whose arguments follow their schemas.
    parallel: it may have several. strict: the tools whose arguments follow their schemas, though the answer is free to
    have no call.
    """

    tools: ToolSet
    forced: bool = False
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def need_grammar(self) -> bool:
        return self.forced or not self.parallel or bool(self.strict)

    def follows_schema(self, name: str) -> bool:
        return self.forced or name in self.strict


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """A tool's arguments, as its schema declares them, or the schema that it refers to.

    parameters: the JSON schema; {} if it has none. properties: the schema of each named argument, required ones that
    have no schema included.
    """

    parameters: Mapping[str, Any]
    properties: Mapping[str, Mapping[str, Any]]
    required: frozenset[str]


def _signature(schema: object) -> ToolSignature:
    parameters = schema if isinstance(schema, Mapping) else {}
    named_by = parameters
    for _ in range(_MAX_DEPTH):
        if "properties" not in named_by and isinstance(target := _referred(named_by, parameters), Mapping):
            named_by = target
    declared, demanded = named_by.get("properties"), named_by.get("required")
    properties = dict(declared) if isinstance(declared, Mapping) else {}
    named = {key: value if isinstance(value, Mapping) else {} for key, value in properties.items()}
    required = [key for key in demanded if isinstance(key, str)] if isinstance(demanded, list) else []
    unnamed: dict[str, Mapping[str, Any]] = {key: {} for key in required if key not in named}
    return ToolSignature(parameters, {**named, **unnamed}, frozenset(required))


def json_type(value: object) -> str:
    """The JSON type of a value that `json.loads` made."""
    return "null" if value is None else _TYPE_NAMES[type(value)]


def parse_json(text: str) -> Any:
    """As `json.loads`, but strict: no NaN, no Infinity. Raises ValueError, for too deep a nesting as well."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


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


def _referred(schema: Mapping[str, Any], root: Mapping[str, Any]) -> object:
    """What a schema refers to; None if it refers to nothing in the same document."""
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return None
    target: object = root
    for part in reference[2:].split("/", _MAX_DEPTH):
        key = part.replace("~1", "/").replace("~0", "~")
        target = target.get(key) if isinstance(target, Mapping) else None
    return target
