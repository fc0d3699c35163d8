"""Tool calls as Hermes, Qwen and the templates that follow them write them.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

The format is that of the NousResearch/Hermes-Function-Calling prompts and of Qwen2.5's chat template.
"""

import json

from gateway.formats.conversation import to_json
from gateway.formats.parsing import CallParser
from gateway.formats.reading import Malformed, Steps
from gateway.formats.tools import parse_json

OPENER = "<tool_call>"
CLOSER = "</tool_call>"


class HermesParser(CallParser):
    """Reads one call after each opener. It is held back until it is complete: arguments may come before the name."""

    name = "hermes"
    sign = opener = OPENER
    markers = frozenset({OPENER, CLOSER})
    end_of_call = "}\n" + CLOSER
    separator = "\n"

    def _read_calls(self) -> Steps[None]:
        text = yield from self._raw_value(CLOSER)
        try:
            call = parse_json(text)
        except ValueError:
            raise Malformed from None
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            raise Malformed
        name, arguments = call["name"], call["arguments"]
        if name not in self._tools.names or not isinstance(arguments, dict):
            raise Malformed
        for key, value in arguments.items():
            self._key(name, key)
            self._arguments(json.dumps(value, ensure_ascii=False))
        self._end(name)

    @staticmethod
    def begin_of_call(name: str) -> str:
        return f'\n{{"name": {to_json(name)}, "arguments": '
