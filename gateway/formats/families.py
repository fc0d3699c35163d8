"""Which chat format a checkpoint has, and prompts by a Jinja template, of the checkpoint or of --chat-template."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jinja2 import Environment, TemplateSyntaxError

from control.grammar import JsonSchema, Structure
from gateway.formats import deepseek_v32, glm
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
)
from gateway.formats.grammar import CallGrammar, choice
from gateway.formats.json_calls import HermesParser, JsonCallParser
from gateway.formats.parsing import CallParser
from gateway.formats.tools import CallRules, Tool, ToolSet, parse_json

_Renderer: TypeAlias = Callable[[Sequence[Message], Sequence[Tool], bool | None, Mapping[str, Any], PromptEnd], Prompt]
"""Arguments: messages, tools, whether to think, variables, end."""
_SYNTAXES: tuple[type[CallParser], ...] = (deepseek_v32.DsmlParser, glm.GlmParser, HermesParser)
CALL_PARSERS = (*(syntax.name for syntax in _SYNTAXES), "none")
"""The values of --tool-call-parser."""
ApplyTemplate: TypeAlias = Callable[
    [list[dict[str, Any]], list[dict[str, Any]] | None, Mapping[str, Any], PromptEnd], str
]
"""Renders messages, tools (None: there are none) and variables."""


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
        messages: Sequence[Message],
        tools: Sequence[Tool],
        thinking: bool | None,
        variables: Mapping[str, Any],
        end: PromptEnd,
    ) -> Prompt:
        if thinking is not None and not {"thinking", "enable_thinking"} & variables.keys():
            variables = {**variables, "thinking": thinking, "enable_thinking": thinking}
        text = apply(list(map(as_templates_expect, messages)), [dict(tool) for tool in tools] or None, variables, end)
        return Prompt(text, reasons and text.rstrip().endswith(BEGIN_OF_REASONING))

    return render


class ChatFormat:
    """How one family of models writes conversations: a way to render, and a syntax of calls or none.

    Any thread may call it. name: as in --tool-call-parser. end_of_reasoning: the text after reasoning; None if the
    format knows no reasoning. markers: texts of tokens that the parser looks for, so the detokenizer must not skip
    them. knows_tools: prompts tell of tools.
    """

    def __init__(
        self, renderer: _Renderer, syntax: type[CallParser] | None, *, reasons: bool, knows_tools: bool = True
    ) -> None:
        self._renderer = renderer
        self._syntax = syntax
        self.knows_tools = knows_tools
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
        end: PromptEnd = PromptEnd.NEW_ANSWER,
        may_reason: bool = False,
    ) -> Prompt:
        """The prompt. Raises FormatError for a conversation that cannot be rendered.

        thinking: whether to reason first; None: the family's default. variables: chat_template_kwargs, of which
        `thinking` and `enable_thinking` win over the argument. may_reason: `thinking` false is a wish.
        """
        last = messages[-1] if messages else {}
        if end is PromptEnd.OPEN_MESSAGE and (last.get("role") != "assistant" or last.get("tool_calls")):
            raise FormatError(
                "expected an assistant's message without tool calls at the end, which the answer goes on with"
            )
        variables = variables or {}
        prompt = self._renderer(messages, tools, thinking, variables, end)
        if prompt.reasoning and not asks_for_thinking(None if may_reason else thinking, variables, default=True):
            raise FormatError(
                "this model's chat template always reasons: reasoning_effort 'none' and enable_thinking false are not "
                "supported"
            )
        return prompt if self.end_of_reasoning else Prompt(prompt.text, reasoning=False)

    def parser(self, rules: CallRules, *, reasoning: bool, whole_calls: bool = False) -> CallParser:
        """A parser of one answer. reasoning: `Prompt.reasoning`."""
        syntax = self._syntax_of(rules)
        end = self.end_of_reasoning if reasoning else None
        if syntax is None:
            # Without tools, all parsers are alike.
            return HermesParser(CallRules(ToolSet(())), end_of_reasoning=end, whole_calls=whole_calls)
        return syntax(rules, end_of_reasoning=end, whole_calls=whole_calls)

    def call_grammar(
        self,
        rules: CallRules,
        token_ids: Mapping[str, int] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> str | None:
        """A grammar (llguidance's Lark) of an answer after its reasoning; None if the format has no calls.

        token_ids: the tokenizer's added tokens, by their text. schema: of the answer, unless it calls; None: any text,
        with calls in it. Raises FormatError if the grammar is longer than decode nodes take.
        """
        syntax = self._syntax_of(rules)
        if syntax is None:
            return None
        grammar = CallGrammar({text: i for text, i in (token_ids or {}).items() if text in syntax.markers})
        free, calls = "", []
        for number, name in enumerate(rules.tools.names):
            if rules.follows_schema(name):
                arguments = syntax.arguments_grammar(grammar, rules.tools, name, str(number))
            else:
                arguments = free = free or grammar.rule("free", syntax.free_arguments_grammar(grammar))
            begin, end = map(grammar.literal, (syntax.begin_of_call(name), syntax.end_of_call))
            calls.append(grammar.rule(f"call_{number}", f"{begin} {arguments} {end}"))
        block = syntax.calls_grammar(grammar, grammar.rule("call", choice(calls)), rules.parallel)
        return grammar.text(_answer(grammar, syntax, rules, grammar.rule("calls", block), schema))

    def _syntax_of(self, rules: CallRules) -> type[CallParser] | None:
        return JsonCallParser if self._syntax is None and rules.forced else self._syntax


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


def _answer(
    grammar: CallGrammar, syntax: type[CallParser], rules: CallRules, calls: str, schema: Mapping[str, Any] | None
) -> str:
    """Calls alone, JSON or calls, or text that may have calls. calls: the rule of what follows an opener."""
    if rules.forced or schema is not None:
        more = ""
        if rules.parallel and syntax.separator is not None:
            more = f"({grammar.literal(syntax.separator + syntax.opener)} {calls})*"
        alone = f"{grammar.literal(syntax.lead + syntax.opener)} {calls} {more} {grammar.literal(syntax.trail)}"
        return alone if schema is None else f"{grammar.json('text', schema, {}, 'the answer')} | {alone}"
    text = grammar.rule("text", "/(?s:.*)/")
    called = f"{grammar.string('opened', {}, syntax.opener)} {calls}"
    return f"({called})* {text}" if rules.parallel else f"{text} | {called}"


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
    knows_tools = _knows_tools(template)
    if call_parser is None:
        syntax = next((syntax for syntax in _SYNTAXES if syntax.sign in template and knows_tools), None)
    else:
        syntax = next((syntax for syntax in _SYNTAXES if syntax.name == call_parser), None)
    reasons = parse_reasoning and END_OF_REASONING in template
    renderer = template_renderer(template, apply, reasons)
    return ChatFormat(renderer, syntax, reasons=reasons, knows_tools=knows_tools)


def _knows_tools(template: str) -> bool:
    """Whether a template reads the variable `tools`."""
    try:
        return any(kind == "name" and value == "tools" for _, kind, value in Environment().lex(template))
    except TemplateSyntaxError:
        # Nothing can be rendered, and each request is told so.
        return True
