"""Tool calls as GLM-4.7 and GLM-5 write them.

The format is that of the chat template in the zai-org/GLM-5 checkpoints:

    <tool_call>get_weather<arg_key>city</arg_key><arg_value>Beijing</arg_value></tool_call>

The template writes a string as it stands and anything else as JSON, so a value does not say which it is; the tool's
schema does. Where the schema allows a string and something else, or says nothing, a value is read as the template
would have written it: JSON of a type that is allowed, but not a string, is JSON; any other text is a string.
"""

import re

from gateway.formats.conversation import to_json
from gateway.formats.grammar import CallGrammar
from gateway.formats.parsing import CallParser
from gateway.formats.reading import Malformed, Steps
from gateway.formats.tools import ToolSet, json_type, parse_json

OPENER = "<tool_call>"
CLOSER = "</tool_call>"
KEY = "<arg_key>"
END_OF_KEY = "</arg_key>"
VALUE = "<arg_value>"
END_OF_VALUE = "</arg_value>"

_WORD = re.compile(r"[^\s<]*")


class GlmParser(CallParser):
    """Reads one call after each opener. White space may stand between the tags, as GLM-4.5 writes it."""

    name = "glm47"
    sign = KEY
    opener = OPENER
    markers = frozenset({OPENER, CLOSER, KEY, END_OF_KEY, VALUE, END_OF_VALUE})
    end_of_call = CLOSER

    def _read_calls(self) -> Steps[None]:
        name = yield from self._name()
        while (yield from self._spaced(KEY, CLOSER)) == KEY:
            key = yield from self._word("<")
            yield from self._literal(END_OF_KEY)
            yield from self._spaced(VALUE)
            if key in self._keys:
                raise Malformed
            types = self._tools.types(name, key)
            if types == frozenset({"string"}):
                self._key(name, key)
                yield from self._string_value(END_OF_VALUE)
            elif types is not None and "string" not in types:
                yield from self._json_value(name, key, END_OF_VALUE)
            else:
                value = _json_or_string((yield from self._raw_value(END_OF_VALUE)), types)
                self._key(name, key)
                self._arguments(value)
        self._end(name)

    def _name(self) -> Steps[str]:
        """The name of a tool, which a tag or white space ends. Another name is malformed as soon as it differs."""
        while True:
            found = _WORD.match(self._text, self._pos)
            end = found.end() if found else self._pos
            word, ended = self._text[self._pos : end], end < len(self._text)
            if ended and word in self._tools.names:
                return self._take(len(word))
            if ended or not any(name.startswith(word) for name in self._tools.names):
                raise Malformed
            yield from self._more()

    @staticmethod
    def begin_of_call(name: str) -> str:
        return name

    @staticmethod
    def arguments_grammar(rules: CallGrammar, tools: ToolSet, name: str, number: str) -> str:
        body = []
        for position, (key, schema) in enumerate(tools[name].properties.items()):
            types = tools.types(name, key)
            if types is None or "string" in types:
                value = rules.string(f"text_{number}_{position}", schema, END_OF_VALUE)
            else:
                json_value = rules.json(f"json_{number}_{position}", schema, tools[name].parameters, name, key)
                value = f"{json_value} {rules.literal(END_OF_VALUE)}"
            begin = rules.literal(f"{KEY}{key}{END_OF_KEY}{VALUE}")
            argument = rules.rule(f"argument_{number}_{position}", f"{begin} {value}")
            body.append(argument if key in tools[name].required else f"{argument}?")
        return " ".join(body)

    @staticmethod
    def free_arguments_grammar(rules: CallGrammar) -> str:
        value = rules.string("any", {}, END_OF_VALUE)
        return f"({rules.literal(KEY)} /[^<\\n]{{1,256}}/ {rules.literal(END_OF_KEY + VALUE)} {value})*"


def _json_or_string(text: str, types: frozenset[str] | None) -> str:
    try:
        found = json_type(parse_json(text.strip()))
    except ValueError:
        found = "string"
    if found == "string" or (types is not None and found not in types):
        return to_json(text)
    return text.strip()
