"""Grammars of tool calls in llguidance's dialect of Lark, in which JSON schemas can stand (`%json`).

Strings stand in a call as they are, so of their schemas only `enum` and `const` are enforced. Arguments come in the
order in which the schema names them, and required ones always. A marker that is one token in the vocabulary, as GLM's
`<tool_call>`, is that token. A string ends at its marker in either form, because parsers read text.

Every value repeats the definitions of its tool's schema, so a small schema may make a large grammar: its length is
bounded as it is made.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from control.grammar import MAX_LARK
from gateway.formats.conversation import FormatError, to_json

_DEFINITIONS = ("$defs", "definitions")
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""How the chat formats write JSON. With free white space, a model may write it without end."""


class CallGrammar:
    """Rules by name, and their text. marker_ids: markers that are tokens. Raises FormatError beyond `MAX_LARK`."""

    def __init__(self, marker_ids: Mapping[str, int]) -> None:
        self._rules: list[str] = []
        self._room = MAX_LARK
        """Characters that the text has left."""
        self._ids = marker_ids
        longest_first = sorted(marker_ids, key=len, reverse=True)
        # Without markers, the pattern matches nowhere.
        self._markers = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def rule(self, name: str, body: str, attributes: str = "") -> str:
        """Add a rule. Returns its name. attributes: in brackets, or none."""
        rule = f"{name}{attributes}: {body}"
        self._room -= len(rule) + len("\n")
        if self._room < 0:
            raise _too_long()
        self._rules.append(rule)
        return name

    def json(self, name: str, schema: Mapping[str, Any], root: Mapping[str, Any], tool: str, key: str = "") -> str:
        """A value that follows a schema, whose references look into `root`. Errors name the tool and its argument."""
        definitions = {key: root[key] for key in _DEFINITIONS if key in root}
        place = "/properties/" + key.replace("~", "~0").replace("/", "~1") if key else ""
        labels = {"$comment": f"{tool}#{place}", "x-guidance": _LAYOUT}
        pieces, room = ["%json "], self._room
        for piece in json.JSONEncoder().iterencode({**definitions, **schema, **labels}):
            room -= len(piece)
            if room < 0:
                raise _too_long()
            pieces.append(piece)
        return self.rule(name, "".join(pieces))

    def literal(self, text: str) -> str:
        """Text of the format, whose markers are tokens."""
        return " ".join(
            f"<[{self._ids[piece]}]>" if piece in self._ids else to_json(piece) for piece in self._pieces(text)
        )

    def _pieces(self, text: str) -> list[str]:
        return [piece for piece in self._markers.split(text) if piece]

    def string(self, name: str, schema: Mapping[str, Any], end: str) -> str:
        """A string as it stands and the marker `end` after it."""
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        strings = [value for value in values if isinstance(value, str)] if isinstance(values, list) else []
        if strings:
            return self.rule(name, f"{choice([to_json(value) for value in strings])} {self.literal(end)}")
        before, *rest = self._pieces(end)
        if not rest and before not in self._ids:
            return self._spelled(name, end)
        # Up to the token, with what stands before it in the marker.
        text = "/(?s:.*)/" if before in self._ids else f"/(?s:.*){_escaped(before)}/"
        behind = end if before in self._ids else end[len(before) :]
        return self.rule(name, f"{self._spelled(f'{name}_spelled', end)} | {text} {self.literal(behind)}")

    def _spelled(self, name: str, end: str) -> str:
        return self.rule(name, "/(?s:.*)/", f"[suffix={to_json(end)}]")

    def text(self, start: str) -> str:
        """The whole grammar. start: what an answer is."""
        self.rule("start", start)
        return "\n".join(self._rules) + "\n"


def _too_long() -> FormatError:
    return FormatError(f"the grammar of their calls would have more than {MAX_LARK} characters")


def _escaped(text: str) -> str:
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def choice(alternatives: Sequence[str]) -> str:
    return "(" + " | ".join(alternatives) + ")"
