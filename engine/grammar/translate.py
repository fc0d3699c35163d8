"""Writes a grammar down in llguidance's dialect of Lark.

Literal text is cut into strings and added tokens, because llguidance tells the token `<tool_call>` from the letters
that spell it. Text that ends with a marker is a lazy lexeme, which ends at the marker's first occurrence; a marker that
is an added token ends it, too.
"""

import json
import re
from collections.abc import Mapping

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from control.grammar import Grammar, JsonSchema, Lark, Regex, Structure, TextChoice
from engine.grammar import GrammarError
from engine.grammar.json_schema import embedded_schemas, read_schema, with_options

_ANY = "(?s:.*)"


class Translator:
    """Translates grammars for one vocabulary. added_tokens: {token id: its text}."""

    def __init__(self, added_tokens: Mapping[int, str]) -> None:
        self._ids = {text: token_id for token_id, text in added_tokens.items() if text}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def translate(self, grammar: Grammar) -> str:
        """The text that llguidance's matcher takes. Raises GrammarError."""
        rules = ["start: answer"] if grammar.after is None else ["start: free answer", *self._until(grammar.after)]
        grammars = [{"name": "main", "lark_grammar": "\n".join([*rules, *self._answer(grammar.structure)])}]
        if isinstance(grammar.structure, Lark):
            grammars.append({"name": "given", "lark_grammar": _lark(grammar.structure.grammar)})
        return json.dumps({"grammars": grammars})

    def _answer(self, structure: Structure) -> list[str]:
        match structure:
            case JsonSchema():
                return [f"answer: %json {json.dumps(with_options(read_schema(structure.schema_text)))}"]
            case Regex():
                return [f"answer: /{regex_to_lark(structure.pattern, 'd')}/"]
            case TextChoice():
                return self._choice(structure.options)
            case Lark():
                return ["answer: @given"]

    def _choice(self, options: tuple[str, ...]) -> list[str]:
        """Options without added tokens become one lexeme: the number of alternatives of a rule is bounded."""
        plain: list[str] = []
        others: list[str] = []
        for option in dict.fromkeys(options):
            pieces = self._pieces(option)
            is_plain = len(pieces) == 1 and isinstance(pieces[0], str)
            (plain if is_plain else others).append(" ".join(map(_quoted, pieces)) or '""')
        if not plain:
            return [f"answer: {' | '.join(others)}"]
        return [f"answer: {' | '.join([*others, 'PLAIN'])}", f"PLAIN: {' | '.join(plain)}"]

    def _until(self, end: str) -> list[str]:
        """Any text up to and with the first occurrence of `end`, spelled out or as added tokens: the rule `free`."""
        rules = [f"TEXT: /{_ANY}/", f"spelled[lazy]: TEXT {_quoted(end)}"]
        pieces = self._pieces(end)
        first = next((index for index, piece in enumerate(pieces) if isinstance(piece, int)), None)
        if first is None:
            return [*rules, "free: spelled"]
        before = "".join(str(piece) for piece in pieces[:first])
        text = f"/{_ANY}{regex_to_lark(_escaped(before), '')}/" if before else "TEXT"
        return [*rules, f"free: spelled | {text} {' '.join(map(_quoted, pieces[first:]))}"]

    def _pieces(self, text: str) -> list[str | int]:
        """Literal text as strings and ids of added tokens."""
        found: list[str | int] = []
        start = 0
        for match in self._added.finditer(text) if self._added else ():
            found += [text[start : match.start()], self._ids[match[0]]]
            start = match.end()
        return [piece for piece in [*found, text[start:]] if piece != ""]


def _quoted(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece, ensure_ascii=False)


def _escaped(text: str) -> str:
    """Text as a regular expression that matches nothing else."""
    return "".join(character if character.isalnum() else f"\\x{{{ord(character):x}}}" for character in text)


def _lark(grammar: str) -> str:
    """A Lark grammar with its JSON schemas made ready; a GBNF grammar as Lark."""
    if "::=" not in grammar:
        pieces, at = [], 0
        for start, end, schema in embedded_schemas(grammar):
            given = grammar[start:end]
            # Errors name lines of the text: it changes only where it has to.
            pieces += [grammar[at:start], given if json.loads(given) == schema else json.dumps(schema)]
            at = end
        return "".join([*pieces, grammar[at:]])
    try:
        return gbnf_to_lark(grammar)
    except RecursionError as error:
        raise GrammarError("the grammar is nested too deep") from error
    except MemoryError:
        raise
    except Exception as error:  # whatever the converter raises, bare exceptions included
        raise GrammarError(f"the GBNF grammar cannot be read: {error}") from error
