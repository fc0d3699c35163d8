"""Which chat format a checkpoint has, and prompts by a Jinja template, of the checkpoint or of --chat-template."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from gateway.formats import deepseek_v32, glm, hermes
from gateway.formats.conversation import BEGIN_OF_REASONING, END_OF_REASONING, Message, Prompt, arguments_of, content_of
from gateway.formats.grammar import CallGrammar, choice
from gateway.formats.parsing import CallParser
from gateway.formats.tools import Tool, ToolSet

_Renderer: TypeAlias = Callable[[Sequence[Message], Sequence[Tool], bool | None, Mapping[str, Any]], Prompt]
"""Arguments: messages, tools, whether to think, variables."""
_SYNTAXES: tuple[type[CallParser], ...] = (deepseek_v32.DsmlParser, glm.GlmParser, hermes.HermesParser)
CALL_PARSERS = (*(syntax.name for syntax in _SYNTAXES), "none")
"""The values of --tool-call-parser."""
ApplyTemplate: TypeAlias = Callable[[list[dict[str, Any]], list[dict[str, Any]] | None, Mapping[str, Any]], str]
"""Renders messages, tools (None: there are none) and variables, with the generation prompt at the end."""


def template_renderer(source: str, apply: ApplyTemplate, reasons: bool) -> _Renderer:
    """Gives a template what templates expect, which is not quite what OpenAI's API has:

    - the arguments of calls as mappings, not as JSON text;
    - content that is missing as "", where templates would write "None";
    - a developer's message as a system message where the template does not know the role: it would leave it out.

    source: the text of the template, which `apply` renders. reasons: an answer begins in reasoning where the prompt
    ends with the begin of reasoning: templates reason by default or not.
    """
    knows_developers = "developer" in source

    def as_templates_expect(message: Message) -> dict[str, Any]:
        rendered = {**message, "content": content_of(message)}
        if message["role"] == "developer" and not knows_developers:
            rendered["role"] = "system"
        if calls := message.get("tool_calls"):
            rendered["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments_of(call)}} for call in calls
            ]
        return rendered

    def render(
        messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None, variables: Mapping[str, Any]
    ) -> Prompt:
        if thinking is not None and not {"thinking", "enable_thinking"} & variables.keys():
            variables = {**variables, "thinking": thinking, "enable_thinking": thinking}
        text = apply(list(map(as_templates_expect, messages)), [dict(tool) for tool in tools] or None, variables)
        return Prompt(text, reasons and text.rstrip().endswith(BEGIN_OF_REASONING))

    return render


class ChatFormat:
    """How one family of models writes conversations: a way to render, and a syntax of calls or none.

    Any thread may call it. name: as in --tool-call-parser. end_of_reasoning: the text after reasoning; None if the
    format knows no reasoning. markers: texts of tokens that the parser looks for, so the detokenizer must not skip
    them.
    """

    def __init__(self, renderer: _Renderer, syntax: type[CallParser] | None, *, reasons: bool) -> None:
        self._renderer = renderer
        self._syntax = syntax
        self.name = syntax.name if syntax else "none"
        self.end_of_reasoning = END_OF_REASONING if reasons else None
        reasoning = frozenset({BEGIN_OF_REASONING, END_OF_REASONING}) if reasons else frozenset()
        self.markers = reasoning | (syntax.markers if syntax else frozenset())

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        thinking: bool | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """The prompt. Raises FormatError for a conversation that cannot be rendered.

        thinking: whether to reason first; None: the family's default. variables: chat_template_kwargs, of which
        `thinking` and `enable_thinking` win over the argument.
        """
        prompt = self._renderer(messages, tools, thinking, variables or {})
        return prompt if self.end_of_reasoning else Prompt(prompt.text, reasoning=False)

    def parser(self, tools: ToolSet, *, reasoning: bool, whole_calls: bool = False) -> CallParser:
        """A parser of one answer. tools: those that may be called. reasoning: `Prompt.reasoning`."""
        # Without tools, all parsers are alike.
        parser, readable = (hermes.HermesParser, ToolSet(())) if self._syntax is None else (self._syntax, tools)
        end = self.end_of_reasoning if reasoning else None
        return parser(readable, end_of_reasoning=end, whole_calls=whole_calls)

    def call_grammar(
        self, tools: ToolSet, *, parallel: bool = True, token_ids: Mapping[str, int] | None = None
    ) -> str | None:
        """A grammar (llguidance's Lark) of nothing but calls, after the reasoning; None if the format has no calls.

        tools: those to choose from. parallel: more than one call is allowed. token_ids: the tokenizer's added tokens,
        by their text. Raises FormatError if the grammar is longer than decode nodes take.
        """
        if self._syntax is None:
            return None
        rules = CallGrammar({text: i for text, i in (token_ids or {}).items() if text in self._syntax.markers})
        calls = [self._syntax.call_grammar(rules, tools, name, str(number)) for number, name in enumerate(tools.names)]
        return rules.text(self._syntax.several(rules, rules.rule("call", choice(calls)), parallel))


def choose_format(
    model_type: str,
    *,
    template: str | None,
    apply: ApplyTemplate | None = None,
    call_parser: str | None = None,
    parse_reasoning: bool = True,
) -> ChatFormat | None:
    """The chat format of a checkpoint; None if it has none.

    A template renders, --chat-template before the checkpoint's own. Only DeepSeek-V3.2 is rendered without one, by the
    encoder here: DeepSeek-V3.2-Exp has the same model type and ships a template. The syntax of calls is the first of
    `CALL_PARSERS` of which the template contains a marker.

    model_type: of config.json. template: the text of the Jinja template, if there is one, and `apply` renders it.
    call_parser: one of `CALL_PARSERS`; None: as described. parse_reasoning: false leaves reasoning in the content.
    Raises ValueError for a call parser that does not exist or does not fit.
    """
    if call_parser is not None and call_parser not in CALL_PARSERS:
        raise ValueError(f"expected a tool call parser of {', '.join(CALL_PARSERS)}, found {call_parser}")
    if template is None:
        if model_type != "deepseek_v32":
            return None
        if call_parser not in (None, "none", "deepseek_v32"):
            raise ValueError(f"expected the tool call parser deepseek_v32 for this checkpoint, found {call_parser}")
        syntax = None if call_parser == "none" else _SYNTAXES[0]
        return ChatFormat(deepseek_v32.render, syntax, reasons=parse_reasoning)
    if apply is None:
        raise ValueError("a template needs something that applies it")
    if call_parser is None:
        syntax = next((syntax for syntax in _SYNTAXES if syntax.sign in template and "tools" in template), None)
    else:
        syntax = next((syntax for syntax in _SYNTAXES if syntax.name == call_parser), None)
    reasons = parse_reasoning and END_OF_REASONING in template
    return ChatFormat(template_renderer(template, apply, reasons), syntax, reasons=reasons)
