# ruff: noqa: RUF001, RUF002 - the format has full-width bars
"""DeepSeek-V3.2's chat format, which no Jinja template describes.

It is defined by `encoding/encoding_dsv32.py` in the deepseek-ai/DeepSeek-V3.2 checkpoint (and by the examples with
it). What this encoder renders, that one renders in the same way. It departs only where that one fails or loses text:

- developer messages: there, the user's turn of a search agent, and dropped with thinking when another turn follows.
  Clients of OpenAI's API write their instructions in one. So one that the model answers is rendered as there, one that
  another message of the client follows is rendered like a system message, and none is dropped;
- a system message after a user's turn or after results: the model goes on after it, not in front, and an
  empty line stands before it;
- a conversation of nothing but system messages: the model goes on after them;
- tools: in the first message if that can hold them (as in the published examples), else in an empty system message;
- results of calls: after the message with the calls and in the order of the calls, by their ids, wherever they stand in
  the conversation. Where results are missing, the block of results ends all the same;
- an assistant's message after the last user message, with thinking, needs no reasoning.

Reasoning is shown to the model only after the last message of the user, that is within a loop of tool calls.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gateway.formats.conversation import (
    BEGIN_OF_REASONING,
    END_OF_REASONING,
    FormatError,
    Message,
    Prompt,
    PromptEnd,
    arguments_of,
    asks_for_thinking,
    content_of,
    to_json,
)
from gateway.formats.grammar import CallGrammar, choice
from gateway.formats.parsing import CallParser
from gateway.formats.reading import Malformed, Steps
from gateway.formats.tools import Tool, ToolSet

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

BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"

_TOOLS = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{MARK}function_calls>" block like the following as part of your reply to the \
user:
<{MARK}function_calls>
<{MARK}invoke name="$FUNCTION_NAME">
<{MARK}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{MARK}parameter>
...
</{MARK}invoke>
<{MARK}invoke name="$FUNCTION_NAME2">
...
</{MARK}invoke>
</{MARK}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<{MARK}function_calls>
...
</{MARK}function_calls>

<function_results>
...
</function_results>

{BEGIN_OF_REASONING}...thinking about results{END_OF_REASONING}

Here are the functions available in JSONSchema format:
<functions>
%s
</functions>
"""


def render(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    thinking: bool | None,
    variables: Mapping[str, Any],
    end: PromptEnd,
) -> Prompt:
    """The prompt. The model reasons only if it is asked to, as in DeepSeek's API. Raises FormatError."""
    reasoning = asks_for_thinking(thinking, variables, default=False)
    text = "".join(_Conversation(messages, tools, reasoning, end).render())
    return Prompt(text, reasoning and end is PromptEnd.NEW_ANSWER)


class _Conversation:
    def __init__(self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool, end: PromptEnd) -> None:
        if not messages:
            raise FormatError("expected at least one")
        messages = _by_calls(messages)
        if messages[-1]["role"] == "assistant" and end is PromptEnd.NEW_ANSWER:
            raise FormatError("expected a user's message or a tool's result at the end, found an assistant's")
        self._thinking = thinking
        self._end = end
        self._tools = "\n\n" + _TOOLS % "\n".join(to_json(tool["function"]) for tool in tools) if tools else ""
        self._messages = messages
        self._added = 0
        if self._tools and messages[0]["role"] not in ("system", "developer"):
            self._messages.insert(0, {"role": "system"})
            self._added = 1
        turns = [index for index, message in enumerate(self._messages) if self._is_turn(index)]
        self._last_turn = turns[-1] if turns else -1

    def render(self) -> Iterator[str]:
        yield BEGIN
        for index, message in enumerate(self._messages):
            role, tools = message["role"], self._tools if index == 0 else ""
            if role == "assistant":
                yield self._answer(index, message)
            elif role == "tool":
                yield self._results(index)
            elif role == "developer" and self._is_turn(index):
                yield f"{USER}{tools}\n\n# The user's message is: {content_of(message)}"
            elif role == "user":
                yield USER + content_of(message)
            elif role in ("system", "developer"):
                behind = self._role(index - 1)
                separator = "\n\n" if behind == "tool" or self._is_turn(index - 1) else ""
                yield separator + content_of(message) + tools
            else:
                raise FormatError(f"message {index - self._added}: expected a role of this format, found {role!r}")
            if index < len(self._messages) - 1 or self._end is PromptEnd.NEW_ANSWER:
                yield self._go(index)

    def _role(self, index: int) -> str | None:
        return self._messages[index]["role"] if 0 <= index < len(self._messages) else None

    def _is_turn(self, index: int) -> bool:
        """Whether a message is the user's turn. A developer's is unless another message of the client follows it."""
        following = self._role(index + 1)
        return self._role(index) == "user" or (
            self._role(index) == "developer" and following not in ("user", "developer", "system")
        )

    def _is_instruction(self, index: int) -> bool:
        return self._role(index) in ("system", "developer") and not self._is_turn(index)

    def _go(self, index: int) -> str:
        """What makes the model go on, after the last message of a turn or of results."""
        if self._is_instruction(index + 1) or self._role(index) == self._role(index + 1) == "tool":
            return ""
        before = index
        while self._is_instruction(before):
            before -= 1
        begin = BEGIN_OF_REASONING if self._thinking and index >= self._last_turn else END_OF_REASONING
        if self._role(before) == "tool":
            return "\n\n" + begin
        return ASSISTANT + begin if self._is_turn(before) or index == len(self._messages) - 1 else ""

    def _answer(self, index: int, message: Message) -> str:
        reasoning = ""
        if self._thinking and index > self._last_turn:
            reasoning = (message.get("reasoning_content") or "") + END_OF_REASONING
        calls = [_call(call["function"]["name"], arguments_of(call)) for call in message.get("tool_calls") or ()]
        block = "\n\n" + "\n".join([OPENER, *calls, CLOSER]) if calls else ""
        is_open = self._end is PromptEnd.OPEN_MESSAGE and index == len(self._messages) - 1
        return reasoning + content_of(message) + block + ("" if is_open else END)

    def _results(self, index: int) -> str:
        """All results of the calls of one message, at the first of them."""
        if self._role(index - 1) == "tool":
            return ""
        calls = (self._messages[index - 1].get("tool_calls") or ()) if self._role(index - 1) == "assistant" else ()
        end = index
        while self._role(end) == "tool":
            end += 1
        if end - index > len(calls):
            raise FormatError(
                f"message {index - self._added}: expected at most as many results as the assistant's message before "
                f"them has tool_calls, found {end - index} for {len(calls)}"
            )
        texts = "".join(f"\n<result>{content_of(result)}</result>" for result in self._messages[index:end])
        return f"\n\n<function_results>{texts}\n</function_results>"


def _by_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages, with each result after the last message before it that has its call, in the order of the calls."""
    calls: dict[str, tuple[int, int]] = {}
    """By id of a call, the number of its message and its own."""
    places = []
    for number, message in enumerate(messages):
        place = calls.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        places.append(place or (number, 0))
        calls |= {call.get("id"): (number, order) for order, call in enumerate(message.get("tool_calls") or (), 1)}
    return [messages[number] for number in sorted(range(len(messages)), key=places.__getitem__)]


def _call(name: str, arguments: Mapping[str, Any]) -> str:
    lines = [f'{INVOKE}{name}">']
    for key, value in arguments.items():
        is_string = isinstance(value, str)
        text = value if is_string else to_json(value)
        lines.append(f"{PARAMETER}{key}{_STRING if is_string else _JSON}{text}{END_OF_PARAMETER}")
    # Without arguments, there is an empty line.
    return "\n".join([*lines, *([] if arguments else [""]), END_OF_INVOKE])


class DsmlParser(CallParser):
    """Reads tool calls as DeepSeek-V3.2 writes them, in DSML:

        <｜DSML｜function_calls>
        <｜DSML｜invoke name="get_weather">
        <｜DSML｜parameter name="city" string="true">Hangzhou</｜DSML｜parameter>
        <｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>
        </｜DSML｜invoke>
        </｜DSML｜function_calls>

    A value with string="true" is the text as it stands; one with string="false" is JSON. A parameter that comes twice
    is an error. Unlike in the checkpoint's encoder, any white space may stand between the tags, and the closing tag of
    all calls may lack. Calls after a broken one, in the same block, are content as well.
    """

    name = "deepseek_v32"
    sign = MARK
    opener = OPENER
    markers = frozenset({MARK})
    end_of_call = END_OF_INVOKE
    lead = "\n\n"
    separator = None

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
    def begin_of_call(name: str) -> str:
        return f'{INVOKE}{name}">\n'

    @staticmethod
    def arguments_grammar(rules: CallGrammar, tools: ToolSet, name: str, number: str) -> str:
        body = []
        for position, (key, schema) in enumerate(tools[name].properties.items()):
            types = tools.types(name, key)
            forms = []
            if types is None or "string" in types:
                value = rules.string(f"text_{number}_{position}", schema, END_OF_PARAMETER)
                forms.append(f"{rules.literal(f'{PARAMETER}{key}{_STRING}')} {value}")
            if types != frozenset({"string"}):
                value = rules.json(f"json_{number}_{position}", schema, tools[name].parameters, name, key)
                forms.append(f"{rules.literal(f'{PARAMETER}{key}{_JSON}')} {value} {rules.literal(END_OF_PARAMETER)}")
            argument = rules.rule(f"argument_{number}_{position}", f"{choice(forms)} {rules.literal(_LINE)}")
            body.append(argument if key in tools[name].required else f"{argument}?")
        return " ".join(body)

    @staticmethod
    def free_arguments_grammar(rules: CallGrammar) -> str:
        form = choice([rules.literal(_STRING), rules.literal(_JSON)])
        value = f"{rules.string('any', {}, END_OF_PARAMETER)} {rules.literal(_LINE)}"
        return f'({rules.literal(PARAMETER)} /[^"\\n]{{1,256}}/ {form} {value})*'

    @staticmethod
    def calls_grammar(rules: CallGrammar, call: str, parallel: bool) -> str:
        line = rules.literal(_LINE)
        return f"{line} ({call} {line}){'+' if parallel else ''} {rules.literal(CLOSER)}"
