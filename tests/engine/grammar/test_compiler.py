"""Compilation on threads: cache, attacks, endings."""

import json
import os
import time
from collections.abc import Iterator

import psutil
import pytest

from control.grammar import JSON_OBJECT, Grammar, JsonSchema, Lark, Regex, Structure, TextChoice
from engine.grammar import CompilerBusy, GrammarError, prover
from engine.grammar.compiler import CompilerLimits, GrammarCompiler
from tests.engine.grammar.small import accepts, vocabulary

LIMITS = CompilerLimits(seconds=0.5, quick_seconds=0.2, threads=2)


def patterns(count: int) -> Structure:
    """An intersection whose emptiness takes very long to decide."""
    parts = [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(3, 3 + count)]
    return JsonSchema(schema_text=json.dumps({"allOf": parts}))


def chain(rules: int) -> Structure:
    """Rules that the library follows by recursion."""
    return Lark(grammar="start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(rules)) + f'a{rules}: "x"')


def product(factors: int) -> Structure:
    """Alternatives that multiply."""
    parts = [
        {"anyOf": [{"properties": {f"p{i}{j}": {"maxLength": i + j}}, "required": [f"p{i}{j}"]} for j in range(4)]}
        for i in range(factors)
    ]
    return JsonSchema(schema_text=json.dumps({"type": "object", "allOf": parts}))


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(vocabulary(), LIMITS)
    yield made
    made.close()


def submit(compiler: GrammarCompiler, structure: Structure) -> GrammarError | None:
    error = compiler.submit(Grammar(structure=structure)).exception(60)
    assert error is None or isinstance(error, GrammarError)
    return error


def test_what_compiles_is_compiled_once(compiler: GrammarCompiler) -> None:
    first = compiler.submit(Grammar(structure=JSON_OBJECT))
    assert accepts(first.result(60).start(), '{"a": 1}')
    again = compiler.submit(Grammar(structure=JSON_OBJECT.model_copy()))
    assert again.done()
    assert again.result() is first.result()


def test_a_mistake_in_a_long_value_of_any_script_is_named(compiler: GrammarCompiler) -> None:
    schema = {"properties": {"a": {"minimum": "é" * 99}}}
    for structure in (JsonSchema(schema_text=json.dumps(schema)), Lark(grammar=f"start: %json {json.dumps(schema)}")):
        assert f"{structure.kind} at /properties/a: " in str(submit(compiler, structure))
    assert submit(compiler, JSON_OBJECT) is None


def test_a_process_that_is_killed_is_no_fault_of_the_grammar() -> None:
    others = psutil.Process(os.getpid()).children()
    compiler, grammar = GrammarCompiler(vocabulary(), LIMITS), Grammar(structure=patterns(17))
    try:
        assert submit(compiler, JSON_OBJECT) is None
        future = compiler.submit(grammar)
        for process in psutil.Process(os.getpid()).children():
            if process not in others:
                process.kill()
        assert isinstance(future.exception(60), CompilerBusy)
        until = time.monotonic() + 60
        while isinstance(error := compiler.submit(grammar).exception(60), CompilerBusy):
            assert time.monotonic() < until
        assert "takes more than" in str(error)
    finally:
        compiler.close()


def test_an_error_is_remembered(compiler: GrammarCompiler) -> None:
    wrong = Grammar(structure=Regex(pattern="("))
    assert "regex: " in str(compiler.submit(wrong).exception(60))
    assert compiler.submit(wrong).done()


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (chain(5000), "nested too deep"),
        (patterns(17), "takes more than 0.5 s"),
        (product(12), "too large|too big|more than|memory"),
    ],
    ids=["stack", "time", "product"],
)
def test_an_attack_becomes_an_error_and_the_next_grammar_compiles(
    compiler: GrammarCompiler, attack: Structure, message: str
) -> None:
    error = submit(compiler, attack)
    assert error is not None
    assert any(part in str(error) for part in message.split("|")), str(error)
    assert submit(compiler, TextChoice(options=("a", message))) is None


def test_a_small_grammar_does_not_wait_for_an_attack() -> None:
    compiler = GrammarCompiler(vocabulary(), LIMITS)
    try:
        # All processes are ready.
        for number in range(4):
            assert submit(compiler, TextChoice(options=(f"ready {number}",))) is None
        attack = compiler.submit(Grammar(structure=patterns(17)))
        small = compiler.submit(Grammar(structure=TextChoice(options=("a", "b"))))
        before = time.monotonic()
        assert small.result(60)
        waited = time.monotonic() - before
        assert not attack.done()
        assert "takes more than 0.5 s" in str(attack.exception(60))
        assert waited < time.monotonic() - before
    finally:
        compiler.close()


def test_a_process_that_starts_too_slowly_is_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as slow:
        slow.setattr(prover, "_START_S", 0.0)
        compiler = GrammarCompiler(vocabulary(), LIMITS)
        error = compiler.submit(Grammar(structure=JSON_OBJECT)).exception(60)
    assert isinstance(error, CompilerBusy)
    assert "does not start in time" in str(error)
    try:
        assert submit(compiler, JSON_OBJECT) is None
    finally:
        compiler.close()


def test_a_full_queue_and_a_closed_compiler_refuse() -> None:
    compiler = GrammarCompiler(vocabulary(), CompilerLimits(seconds=1.0, threads=1, waiting=1))
    children = len(psutil.Process(os.getpid()).children())
    futures = [compiler.submit(Grammar(structure=patterns(17 + n))) for n in range(4)]
    assert any(isinstance(future.exception(0), CompilerBusy) for future in futures if future.done())
    compiler.close()
    assert all(isinstance(future.exception(10), CompilerBusy) for future in futures)
    with pytest.raises(CompilerBusy):
        compiler.submit(Grammar(structure=JSON_OBJECT)).result(10)
    assert len(psutil.Process(os.getpid()).children()) <= children


def test_the_cache_is_bounded() -> None:
    compiler = GrammarCompiler(vocabulary(), CompilerLimits(threads=1, entries=2))
    try:
        grammars = [Grammar(structure=TextChoice(options=(f"{n}",))) for n in range(3)]
        for grammar in grammars:
            compiler.submit(grammar).result(60)
        assert not compiler.submit(grammars[0]).done()
        assert compiler.submit(grammars[2]).done()
    finally:
        compiler.close()
