"""Tool calls that are JSON objects, with the name of the tool in them."""

from gateway.formats.conversation import to_json
from gateway.formats.json_prefix import JsonPrefix
from gateway.formats.parsing import CallParser
from gateway.formats.reading import Malformed, Steps
from gateway.formats.tools import parse_json

OPENER = "<tool_call>"
CLOSER = "</tool_call>"


class HermesParser(CallParser):
    """Reads calls as Hermes, Qwen and the templates that follow them write them:

        <tool_call>
        {"name": "get_weather", "arguments": {"city": "Paris"}}
        </tool_call>

    The format is that of the NousResearch/Hermes-Function-Calling prompts and of Qwen2.5's chat template. A call is
    held back until it is complete: arguments may come before the name.
    """

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
            self._arguments(to_json(value))
        self._end(name)

    @staticmethod
    def begin_of_call(name: str) -> str:
        return f'\n{{"name": {to_json(name)}, "arguments": '


class JsonCallParser(CallParser):
    """Reads calls of models whose format has none, in answers that are forced to be calls: a list of JSON objects.

        [{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]

    A grammar makes the model write it, as in vLLM, so the layout is always this one. Arguments stream as the model
    writes them. What stands between calls is no content, since there is none.
    """

    name = "json"
    opener = '{"name": '
    markers = frozenset()
    end_of_call = "}"
    lead = "["
    separator = ", "
    trail = "]"

    def _read_calls(self) -> Steps[None]:
        begins = {self.begin_of_call(name): name for name in self._tools.names}
        self._begin(begins[(yield from self._literal(*begins))])
        value = JsonPrefix()
        while True:
            good = value.read(self._text[self._pos :])
            if good:
                self._arguments(self._take(good))
            if value.complete:
                break
            if self._pos < len(self._text):
                raise Malformed
            yield from self._more()
        yield from self._literal(self.end_of_call)
        self._end_call()

    @staticmethod
    def begin_of_call(name: str) -> str:
        return f'{to_json(name)}, "parameters": '
