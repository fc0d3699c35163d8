"""Prompts by a Jinja chat template, of a checkpoint or of --chat-template."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from gateway.formats.conversation import Message, Prompt, arguments_of, content_of
from gateway.formats.tools import Tool

ApplyTemplate: TypeAlias = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, Mapping[str, Any]], str]
"""Renders messages, tools (None: there are none) and variables, with the generation prompt at the end."""


class TemplateRenderer:
    """Gives a template what templates expect, which is not quite what OpenAI's API has:

    - the arguments of calls as mappings, not as JSON text;
    - content that is missing as "", where templates would write "None";
    - a developer's message as a system message where the template does not know the role: it would leave it out.
    """

    def __init__(self, source: str, apply: ApplyTemplate, *, begin_of_reasoning: str | None) -> None:
        """source: the text of the template, which `apply` renders."""
        self._apply = apply
        self._knows_developers = "developer" in source
        self._begin_of_reasoning = begin_of_reasoning

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None, variables: Mapping[str, Any]
    ) -> Prompt:
        """The prompt. Raises whatever `apply` raises.

        Templates reason by default or not, as they like. That they do shows in the prompt: it ends where reasoning
        begins.
        """
        if thinking is not None and not {"thinking", "enable_thinking"} & variables.keys():
            variables = {**variables, "thinking": thinking, "enable_thinking": thinking}
        rendered = [self._message(message) for message in messages]
        text = self._apply(rendered, [dict(tool) for tool in tools] or None, variables)
        begin = self._begin_of_reasoning
        return Prompt(text, begin is not None and text.rstrip().endswith(begin))

    def _message(self, message: Message) -> dict[str, Any]:
        rendered = {**message, "content": content_of(message)}
        if message["role"] == "developer" and not self._knows_developers:
            rendered["role"] = "system"
        if calls := message.get("tool_calls"):
            rendered["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments_of(call)}} for call in calls
            ]
        return rendered
