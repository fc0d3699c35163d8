"""Which chat format a checkpoint has."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from gateway.formats import deepseek_v32, dsml, glm, hermes
from gateway.formats.conversation import Message, Prompt
from gateway.formats.parsing import CallParser, TextParser
from gateway.formats.template import ApplyTemplate, TemplateRenderer
from gateway.formats.tools import Tool, ToolSet

_BEGIN_OF_REASONING = "<think>"
_END_OF_REASONING = "</think>"
_Renderer: TypeAlias = Callable[[Sequence[Message], Sequence[Tool], bool | None, Mapping[str, Any]], Prompt]
"""Arguments: messages, tools, whether to think, variables."""
_Grammar: TypeAlias = Callable[[ToolSet, bool, Mapping[str, int]], str]
"""Arguments: tools, whether parallel calls are allowed, ids of markers."""


@dataclass(frozen=True)
class _CallSyntax:
    """How a family writes tool calls. sign: what a template that teaches this syntax contains."""

    name: str
    sign: str
    parser: type[CallParser]
    grammar: _Grammar
    markers: frozenset[str]


_SYNTAXES = (
    _CallSyntax("deepseek_v32", dsml.MARK, dsml.DsmlParser, dsml.grammar, frozenset({dsml.MARK})),
    _CallSyntax(
        "glm47",
        glm.KEY,
        glm.GlmParser,
        glm.grammar,
        frozenset({glm.OPENER, glm.CLOSER, glm.KEY, glm.END_OF_KEY, glm.VALUE, glm.END_OF_VALUE}),
    ),
    _CallSyntax(
        "hermes", hermes.OPENER, hermes.HermesParser, hermes.grammar, frozenset({hermes.OPENER, hermes.CLOSER})
    ),
)
CALL_PARSERS = (*(syntax.name for syntax in _SYNTAXES), "none")
"""The values of --tool-call-parser."""


class ChatFormat:
    """How one family of models writes conversations: a way to render, and a syntax of calls or none.

    Any thread may call it. name: as in --tool-call-parser. end_of_reasoning: the text after reasoning; None if the
    format knows no reasoning. markers: texts of tokens that the parser looks for, so the detokenizer must not skip
    them. stop_strings: end every answer, in addition to the checkpoint's stop tokens.
    """

    stop_strings: tuple[str, ...] = ()

    def __init__(self, renderer: _Renderer, syntax: _CallSyntax | None, *, reasons: bool) -> None:
        self._renderer = renderer
        self._syntax = syntax
        self.name = syntax.name if syntax else "none"
        self.end_of_reasoning = _END_OF_REASONING if reasons else None
        reasoning = frozenset({_BEGIN_OF_REASONING, _END_OF_REASONING}) if reasons else frozenset()
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

    def parser(
        self,
        tools: ToolSet,
        *,
        reasoning: bool,
        whole_calls: bool = False,
        new_id: Callable[[], str] | None = None,
    ) -> CallParser:
        """A parser of one answer. tools: those that may be called; none: everything is text. reasoning:
        `Prompt.reasoning`. whole_calls, new_id: as of `CallParser`."""
        end = self.end_of_reasoning if reasoning else None
        if self._syntax is None or not tools:
            return TextParser(end_of_reasoning=end)
        return self._syntax.parser(tools, end_of_reasoning=end, whole_calls=whole_calls, new_id=new_id)

    def call_grammar(
        self, tools: ToolSet, *, parallel: bool = True, token_ids: Mapping[str, int] | None = None
    ) -> str | None:
        """A grammar (llguidance's Lark) of nothing but calls, after the reasoning; None if the format has no calls.

        tools: those to choose from. parallel: more than one call is allowed. token_ids: the tokenizer's added tokens,
        by their text. Raises FormatError if the grammar is longer than decode nodes take.
        """
        if self._syntax is None:
            return None
        marker_ids = {text: i for text, i in (token_ids or {}).items() if text in self._syntax.markers}
        return self._syntax.grammar(tools, parallel, marker_ids)


def choose_format(
    model_type: str,
    *,
    template: str | None,
    apply: ApplyTemplate | None = None,
    call_parser: str | None = None,
    parse_reasoning: bool = True,
) -> ChatFormat | None:
    """The chat format of a checkpoint; None if it has none.

    A template that is there renders, --chat-template before the checkpoint's own. Without one, DeepSeek-V3.2 is
    rendered by the encoder here. So SGLang decides, too: DeepSeek-V3.2-Exp has the same model type, but ships the
    template of its own format. (vLLM leaves the decision to a flag, --tokenizer-mode.) The syntax of tool calls is the
    one that the template teaches, the first of `CALL_PARSERS` of which it contains a marker.

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
    reasons = parse_reasoning and _END_OF_REASONING in template
    begin = _BEGIN_OF_REASONING if reasons else None
    return ChatFormat(TemplateRenderer(template, apply, begin_of_reasoning=begin), syntax, reasons=reasons)
