"""What the format of a chat makes of its answers: how they are constrained, and how they are taken apart."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from control.grammar import JsonSchema, Structure
from gateway.formats.families import ChatFormat
from gateway.formats.parsing import CallParser
from gateway.formats.tools import CallRules, parse_json


@dataclass(frozen=True)
class ChatReading:
    """How the answers of a chat are constrained and taken apart. reasoning: they begin with it."""

    format: ChatFormat
    calls: CallRules
    reasoning: bool

    def parser(self, whole: bool) -> CallParser:
        """A parser of one answer. whole: the answer does not stream, so calls that break are text."""
        return self.format.parser(self.calls, reasoning=self.reasoning, whole_calls=whole)

    def call_grammar(self, structure: Structure | None, added_ids: Mapping[str, int]) -> str | None:
        """The grammar of answers with calls; None: that of their text, `structure`, is all. Raises FormatError.

        A call that is forced has no text. One that is not may stand in place of JSON, but of no other structure.
        """
        if not self.calls.tools:
            return None
        if structure is None or self.calls.forced:
            return self.format.call_grammar(self.calls, added_ids) if self.calls.need_grammar else None
        schema = _schema(structure)
        return None if schema is None else self.format.call_grammar(self.calls, added_ids, schema)


def _schema(structure: Structure) -> dict[str, Any] | None:
    """The JSON schema of a structure; None if it is none. Decode nodes say what is wrong with one that is not JSON."""
    try:
        schema = parse_json(structure.schema_text) if isinstance(structure, JsonSchema) else None
    except ValueError:
        return None
    return schema if isinstance(schema, dict) else None
