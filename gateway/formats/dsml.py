# ruff: noqa: RUF001, RUF002 - the format has full-width bars
"""Tool calls as DeepSeek-V3.2 writes them, in DSML.

The format is that of `encoding/encoding_dsv32.py` in the deepseek-ai/DeepSeek-V3.2 checkpoint:

    <｜DSML｜function_calls>
    <｜DSML｜invoke name="get_weather">
    <｜DSML｜parameter name="city" string="true">Hangzhou</｜DSML｜parameter>
    <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
    </｜DSML｜invoke>
    </｜DSML｜function_calls>

A value with string="true" is the text as it stands; one with string="false" is JSON. As there, a parameter that comes
twice is an error. Unlike there, any white space may stand between the tags, and the closing tag of all calls may lack.
"""

from collections.abc import Mapping
from typing import Any

from gateway.formats.conversation import to_json
from gateway.formats.grammar import CallGrammar, choice
from gateway.formats.parsing import CallParser
from gateway.formats.reading import Malformed, Steps
from gateway.formats.tools import ToolSet

MARK = "｜DSML｜"
OPENER = f"<{MARK}function_calls>"
CLOSER = f"</{MARK}function_calls>"
INVOKE = f'<{MARK}invoke name="'
END_OF_INVOKE = f"</{MARK}invoke>"
PARAMETER = f'<{MARK}parameter name="'
END_OF_PARAMETER = f"</{MARK}parameter>"

_STRING = '" string="true">'
_JSON = '" string="false">'
_LINE = "\n"


class DsmlParser(CallParser):
    """Reads `OPENER`, calls and `CLOSER`. Calls after a broken one, in the same block, are content as well."""

    name = "deepseek_v32"
    sign = MARK
    opener = OPENER
    markers = frozenset({MARK})

    def _read_calls(self) -> Steps[None]:
        yield from self._spaced(INVOKE)
        while True:
            yield from self._invoke()
            if (yield from self._spaced(INVOKE, CLOSER)) == CLOSER:
                self._certain()
                return

    def _invoke(self) -> Steps[None]:
        header = yield from self._literal(*(f'{name}">' for name in self._tools.names))
        name = header.removesuffix('">')
        while (yield from self._spaced(PARAMETER, END_OF_INVOKE)) == PARAMETER:
            key = yield from self._word('"')
            is_string = (yield from self._literal(_STRING, _JSON)) == _STRING
            if key in self._keys:
                raise Malformed
            if is_string:
                self._key(name, key)
                yield from self._string_value(END_OF_PARAMETER)
            else:
                yield from self._json_value(name, key, END_OF_PARAMETER)
        self._end(name)

    @staticmethod
    def call_grammar(rules: CallGrammar, tools: ToolSet, name: str, number: str) -> str:
        body = [rules.literal(f'{INVOKE}{name}">\n')]
        for position, (key, schema) in enumerate(tools.properties(name).items()):
            types = tools.types(name, key)
            forms = []
            if types is None or "string" in types:
                value = rules.string(f"text_{number}_{position}", schema, END_OF_PARAMETER)
                forms.append(f"{rules.literal(f'{PARAMETER}{key}{_STRING}')} {value}")
            if types != frozenset({"string"}):
                value = rules.json(f"json_{number}_{position}", schema, tools.parameters(name))
                forms.append(f"{rules.literal(f'{PARAMETER}{key}{_JSON}')} {value} {rules.literal(END_OF_PARAMETER)}")
            argument = rules.rule(f"argument_{number}_{position}", f"{choice(forms)} {rules.literal(_LINE)}")
            body.append(argument if key in tools.required(name) else f"{argument}?")
        return rules.rule(f"call_{number}", f"{' '.join(body)} {rules.literal(END_OF_INVOKE + _LINE)}")

    @staticmethod
    def several(rules: CallGrammar, call: str, parallel: bool) -> str:
        begin = rules.literal(f"\n\n{OPENER}\n")
        return f"{begin} {call}{'+' if parallel else ''} {rules.literal(CLOSER)}"


def render(name: str, arguments: Mapping[str, Any]) -> str:
    """One call of a block."""
    lines = [f'{INVOKE}{name}">']
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else to_json(value)
        lines.append(f"{PARAMETER}{key}{_STRING if is_string else _JSON}{text}{END_OF_PARAMETER}")
    # Without arguments, there is an empty line.
    return "\n".join([*lines, *([] if arguments else [""]), END_OF_INVOKE])
