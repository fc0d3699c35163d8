"""Proves grammars harmless, in a process that may die of them: `python -m engine.grammar.proofs`.

A hostile grammar can overflow the library's stack, take all memory or never end. This process translates and compiles
each grammar, and walks some steps of it at random, with a stack of 1 MiB, bounded memory, and an alarm. Its vocabulary
has the bytes and the added tokens, with the model's ids. `Prover` (`prover.py`) talks to it.

It reads one JSON object per line: first {"vocab_size", "added_tokens": [[id, text], ...], "stop_token_ids", "nice"},
answered by {}; then {"grammar": a control.grammar.Grammar, "seconds"} for each proof, answered by {"text": for
llguidance, "held_bytes"} or {"error": the reason}.
"""

import ctypes
import json
import os
import random
import re
import resource
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from pydantic import ValidationError

from control.grammar import Grammar, JsonSchema, Lark, Regex, Structure
from engine.grammar import GrammarError
from engine.grammar.json_schema import embedded_schemas, read_schema, subschemas, with_options
from engine.grammar.translate import Translator

HELD_BYTES = 64 * 2**20
"""Memory that a compiled grammar may hold: every request with it holds about as much."""
PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=50_000,
    max_lexer_states=50_000,
    max_grammar_size=500_000,
    verbose_errors=False,
)
"""Bounds on a grammar, when it is proved and when it is used.

A mask takes some 10 ms at most; each request keeps at most 50,000 lexer states, of 1 to 2 kB.
"""

_MEMORY = 2**30
_STACK = 2**20
_STEPS = 24
_MESSAGE_LENGTH = 600
_IN_TRANSLATION = re.compile(r"^at \d+\(\d+\): ")
_EXCERPT = re.compile(r"\s*(\d+ \||\^+$)")


class Proofs:
    """Compiles grammars for the model's ids, with one token for each byte."""

    def __init__(self, vocab_size: int, added_tokens: Mapping[int, str], stop_token_ids: Sequence[int]) -> None:
        self._translator = Translator(added_tokens)
        tokens = [b""] * vocab_size
        for token_id, text in added_tokens.items():
            tokens[token_id] = text.encode()
        special = {*added_tokens, *stop_token_ids}
        free = (token_id for token_id in range(vocab_size) if token_id not in special)
        for byte, token_id in zip(range(256), free, strict=False):
            tokens[token_id] = bytes([byte])
        self._used = [token_id for token_id, token in enumerate(tokens) if token]
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Bytes(tokens, sorted(special), stop_token_ids[0])), eos_token=list(stop_token_ids)
        )

    def prove(self, grammar: Grammar) -> tuple[str, int]:
        """The grammar's text for llguidance, and the bytes that it holds when compiled.

        Raises GrammarError, which names the part that is wrong.
        """
        try:
            text = self._translator.translate(grammar)
            return text, self._compile(text)
        except GrammarError as error:
            structure, reason = grammar.structure, str(error)
            if isinstance(structure, Regex):
                reason = _IN_TRANSLATION.sub("", reason)
            raise GrammarError(f"{_place(structure, reason)}: {_shortened(reason)}") from error

    def _compile(self, text: str) -> int:
        before = _allocated()
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=PARSER_LIMITS)
        self._walk(matcher)
        if error := matcher.get_error():
            raise GrammarError(error)
        if (held := _allocated() - before) > HELD_BYTES:
            raise GrammarError(f"it takes {held >> 20} MiB of memory; at most {HELD_BYTES >> 20} are allowed")
        return held

    def _walk(self, matcher: LLMatcher) -> None:
        """Some random steps: what is lazily built in them can overflow a stack, too."""
        draw = random.Random(0)
        for _ in range(_STEPS):
            if matcher.is_stopped():
                return
            mask = matcher.compute_bitmask()
            allowed = [token_id for token_id in self._used if mask[token_id >> 3] >> (token_id & 7) & 1]
            if not allowed or not matcher.consume_token(draw.choice(allowed)):
                return


class _Bytes:
    """The vocabulary of a proof, as `TokenizerWrapper` takes it."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_token_ids: Sequence[int], eos_token_id: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_token_ids
        self.eos_token_id = eos_token_id
        self._ids = {token[0]: token_id for token_id, token in enumerate(tokens) if len(token) == 1}

    def __call__(self, text: bytes) -> list[int]:
        return [self._ids[byte] for byte in text]


def _place(structure: Structure, reason: str) -> str:
    """What the reason is about: the kind of structure, and where in a schema. A schema in a Lark grammar may say in its
    `$comment` what it is called and, after a `#`, where it begins."""
    schemas: list[dict[str, Any]] = []
    with suppress(GrammarError):
        if isinstance(structure, JsonSchema):
            schemas = [read_schema(structure.schema_text)]
        elif isinstance(structure, Lark):
            schemas = [schema for _, _, schema in embedded_schemas(structure.grammar)]
    for schema in schemas:
        if _library_error(schema) in reason:
            label = schema.get("$comment") if isinstance(structure, Lark) else None
            name, _, start = str(label or structure.kind).partition("#")
            pointer = _pointer(schema, reason)
            if not pointer.startswith(("/$defs/", "/definitions/")):
                # Definitions are the tool's, copied into each argument's schema.
                pointer = start + pointer
            return f"{name} at {pointer}" if pointer else name
    return structure.kind


def _pointer(root: dict[str, Any], reason: str) -> str:
    """Where in a JSON schema the reason is: the innermost subschema that gives the same one, as a JSON pointer."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    pointer, schema = "", root
    while True:
        for step, within in subschemas(schema):
            if _library_error(definitions | within) in reason:
                pointer, schema = pointer + step, within
                break
        else:
            return pointer


def _library_error(schema: dict[str, Any]) -> str:
    """Why llguidance refuses a schema. If it does not: a text that is in no error."""
    # As text, since the library does not take Python's larger integers.
    text = LLMatcher.grammar_from_json_schema(json.dumps(with_options(schema)))
    try:
        return LLMatcher.validate_grammar(text, None, limits=PARSER_LIMITS) or "\0"
    except BaseException as error:
        # Where the library's excerpt of a value would cut a character in two. Matchers say it in these words.
        if type(error).__name__ != "PanicException":
            raise
        return f"panic: {error}"


def _shortened(message: str) -> str:
    """In one line, without excerpts of the translated grammar, which the client did not write, and backtraces."""
    lines = message.partition("<backtrace>")[0].replace("<non-verbose/>", "").splitlines()
    text = "; ".join(line.strip() for line in lines if line.strip() and not _EXCERPT.match(line))
    text = text.partition("failed to compile JSON schema: ")[2] or text
    return text if len(text) <= _MESSAGE_LENGTH else text[:_MESSAGE_LENGTH] + " ..."


_MALLINFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


def _allocated() -> int:
    """Bytes that are allocated, by glibc's count; 0 where the C library has none."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _serve() -> None:
    begin = json.loads(sys.stdin.readline() or "null")
    if begin is None:
        return
    os.nice(begin["nice"])
    proofs = Proofs(begin["vocab_size"], dict(begin["added_tokens"]), begin["stop_token_ids"])
    _say({})
    for line in sys.stdin:
        question = json.loads(line)
        # The parent ends a proof that takes too long. If it is gone, too, the alarm does.
        signal.setitimer(signal.ITIMER_REAL, question["seconds"] * 8 + 1)
        answer: dict[str, Any]
        try:
            text, held = proofs.prove(Grammar.model_validate_json(question["grammar"]))
            answer = {"text": text, "held_bytes": held}
        except (GrammarError, ValidationError) as error:
            answer = {"error": str(error)}
        except RecursionError:
            answer = {"error": "the grammar is nested too deep"}
        except MemoryError:
            answer = {"error": "compiling the grammar takes too much memory"}
        signal.setitimer(signal.ITIMER_REAL, 0)
        _say(answer)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # A crash is an answer. Nobody needs the library's message about it.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    threading.stack_size(_STACK)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
