"""Writes a grammar down in llguidance's dialect of Lark.

Every node becomes a rule. Literal text is cut into strings and added tokens, because llguidance tells the token
`<tool_call>` from the letters that spell it. Text that ends with a marker is a lazy lexeme, which ends at the marker's
first occurrence; a marker that is an added token ends it, too.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from control.grammar import (
    Either,
    Grammar,
    JsonSchema,
    Lark,
    Leaf,
    Node,
    Regex,
    Repeat,
    Sequence,
    Tags,
    Text,
    TextChoice,
    Until,
    children,
)
from engine.grammar.errors import GrammarError
from engine.grammar.json_schema import read_schema, with_options

_ANY = "(?s:.*)"
_TOO_DEEP = "the grammar is nested too deep"


class Translator:
    """Translates grammars for one vocabulary. added_tokens: {token id: its text}."""

    def __init__(self, added_tokens: Mapping[int, str]) -> None:
        self.texts = dict(added_tokens)
        self._ids = {text: token_id for token_id, text in added_tokens.items() if text}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def translate(self, grammar: Grammar) -> str:
        """The text that llguidance's matcher takes. Raises GrammarError."""
        return _Rules(self).grammar(grammar)

    def pieces(self, text: str) -> list[str | int]:
        """Literal text as strings and ids of added tokens."""
        found: list[str | int] = []
        start = 0
        for match in self._added.finditer(text) if self._added else ():
            found += [text[start : match.start()], self._ids[match[0]]]
            start = match.end()
        return [piece for piece in [*found, text[start:]] if piece != ""]


def leaves(node: Node, where: str = "") -> Iterator[tuple[str, Leaf]]:
    """The parts that clients wrote, each with its place in the grammar."""
    if isinstance(node, JsonSchema | Regex | TextChoice | Lark):
        yield f"{where}: {node.kind}" if where else node.kind, node
    for index, child in enumerate(children(node)):
        yield from leaves(child, f"{where}.{node.kind}[{index}]" if where else f"{node.kind}[{index}]")


class _Rules:
    """The rules of one grammar."""

    def __init__(self, translator: Translator) -> None:
        self._pieces = translator.pieces
        self._texts = translator.texts
        self._rules: list[str] = []
        self._embedded: list[dict[str, str]] = []

    def grammar(self, grammar: Grammar) -> str:
        start = self._node(grammar.root)
        if grammar.after is not None:
            start = f"{self._until(grammar.after)} {start}"
        lark = "\n".join([f"start: {start}", f"TEXT: /{_ANY}/", *self._rules])
        return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, *self._embedded]})

    def _node(self, node: Node) -> str:
        """Add rules for a node. Returns an expression that stands for it: the name of a rule."""
        match node:
            case JsonSchema():
                schema = with_options(read_schema(node.schema_text))
                return self._rule(f"%json {json.dumps(schema)}")
            case Regex():
                return self._rule(f"/{regex_to_lark(node.pattern, 'd')}/")
            case TextChoice():
                return self._choice(dict.fromkeys(node.options))
            case Lark():
                name = f"g{len(self._embedded)}"
                self._embedded.append({"name": name, "lark_grammar": _lark(node.grammar)})
                return self._rule(f"@{name}")
            case Text():
                return self._rule(self._literal(node.text))
            case Until():
                return self._until(node.end)
            case Sequence():
                return self._rule(" ".join(map(self._node, node.items)) or '""')
            case Either():
                return self._rule(" | ".join(map(self._node, node.items)))
            case Repeat():
                bounds = f"{node.least},{'' if node.most is None else node.most}"
                return self._rule(f"{self._node(node.item)}{{{bounds}}}")
            case Tags():
                return self._tags(node)

    def _rule(self, body: str, options: str = "") -> str:
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def _choice(self, options: Iterable[str]) -> str:
        """Options without added tokens become one lexeme: the number of alternatives of a rule is bounded."""
        plain: list[str] = []
        others: list[str] = []
        for option in options:
            pieces = self._pieces(option)
            (plain if len(pieces) == 1 and isinstance(pieces[0], str) else others).append(self._literal(option))
        if plain:
            name = f"OPTION{len(self._rules)}"
            self._rules.append(f"{name}: {' | '.join(plain)}")
            others.append(name)
        return self._rule(" | ".join(others))

    def _literal(self, text: str) -> str:
        return " ".join(map(_quoted, self._pieces(text))) or '""'

    def _until(self, end: str) -> str:
        spelled = self._rule(f"TEXT {_quoted(end)}", "[lazy]")
        pieces = self._pieces(end)
        first = next((index for index, piece in enumerate(pieces) if isinstance(piece, int)), None)
        if first is None:
            return spelled
        before = "".join(str(piece) for piece in pieces[:first])
        rest = " ".join(map(_quoted, pieces[first:]))
        text = f"/{_ANY}{regex_to_lark(_escaped(before), '')}/" if before else "TEXT"
        return self._rule(f"{spelled} | {text} {rest}")

    def _tags(self, node: Tags) -> str:
        after: dict[str, list[str]] = {}
        for tag in node.tags:
            trigger = self._whole_tokens(tag.begin, max(len(t) for t in node.triggers if tag.begin.startswith(t)))
            rest = self._literal(tag.begin[len(trigger) :])
            after.setdefault(trigger, []).append(f"{rest} {self._node(tag.content)} {self._literal(tag.end)}")
        called = [f"{self._until(trigger)} ({' | '.join(tags)})" for trigger, tags in after.items()]
        call = self._rule(" | ".join(called))
        if node.stop_after_first:
            return self._rule(call if node.at_least_one else f"{call} | TEXT")
        return self._rule(f"{call}{'+' if node.at_least_one else '*'} TEXT")

    def _whole_tokens(self, begin: str, length: int) -> str:
        """The beginning of `begin` of that length, or up to the end of the added token that this would cut."""
        covered = 0
        for piece in self._pieces(begin):
            covered += len(piece if isinstance(piece, str) else self._texts[piece])
            if covered >= length:
                return begin[: length if isinstance(piece, str) else covered]
        return begin


def _quoted(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Text as a regular expression that matches nothing else."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def _lark(grammar: str) -> str:
    """A Lark grammar as it is; a GBNF grammar as Lark."""
    if "::=" not in grammar:
        return grammar
    try:
        return gbnf_to_lark(grammar)
    except (GbnfToLarkError, ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
        raise GrammarError(f"the GBNF grammar cannot be read: {error}") from error
    except RecursionError as error:
        raise GrammarError(_TOO_DEEP) from error
