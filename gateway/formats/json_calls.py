"""Tool calls of models whose format has none, in answers that are forced to be calls: a list of JSON objects.

    [{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "get_time", "parameters": {}}]

A grammar makes the model write it, as in vLLM, so the layout is always this one.
"""

from gateway.formats.conversation import to_json
from gateway.formats.json_prefix import JsonPrefix
from gateway.formats.parsing import CallParser
from gateway.formats.reading import Malformed, Steps


class JsonCallParser(CallParser):
    """Arguments stream as the model writes them. What stands between calls is no content, since there is none."""

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
