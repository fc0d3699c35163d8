"""What grammars cost: `python -m benchmarks.grammar [--batch 16] [--vocab-size 129280] [--device cuda]`.

The vocabulary is that of `tiny-model --vocab-size`. The answers are real text, of which each request is at another
place. Masks are timed alone, and then decode steps of a tiny model with such a vocabulary, with and without.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.grammar.cases import CASES
from benchmarks.grammar.steps import GrammarSteps
from benchmarks.machine import this_machine
from benchmarks.program import run
from control.grammar import Grammar, Regex, Structure
from engine.grammar.compiler import GrammarCompiler
from engine.grammar.masks import MaskWriter
from engine.grammar.state import CompiledGrammar, GrammarState
from engine.grammar.vocabulary import Vocabulary
from model.tiny_tokenizer import END_ID, tiny_tokenizer
from service.node_model import use_device

_STEPS = 300


def main(
    batch: Annotated[int, typer.Option(help="Requests of a step.", min=1)] = 16,
    vocab_size: Annotated[int, typer.Option(help="Tokens, and rows of the logits.", min=1000)] = 129_280,
    threads: Annotated[int | None, typer.Option(help="That fill masks; default: the service's.", min=1)] = None,
    steps: Annotated[int, typer.Option(help="Decode steps of each kind; 0: masks alone.", min=0, max=200)] = 100,
    layers: Annotated[int, typer.Option(help="Of the model of these steps.", min=1)] = 4,
    hidden_size: Annotated[int, typer.Option(help="Of the model of these steps.", min=16)] = 64,
    device: Annotated[str, typer.Option(help="cpu, or cuda, that computes these steps.")] = "cpu",
) -> None:
    """Time masks, and decode steps with them and without."""
    where = use_device(device)
    console = Console()
    tokenizer = tiny_tokenizer(vocab_size)
    began = time.perf_counter()
    vocabulary = Vocabulary(json.loads(tokenizer.to_str()), vocab_size, [END_ID])
    took = time.perf_counter() - began
    console.print(f"vocabulary: {tokenizer.get_vocab_size()} tokens of {vocab_size}, loaded in {took:.1f} s")
    compiler = GrammarCompiler(vocabulary)
    try:
        compiled = {name: _compiled(compiler, structure) for name, (structure, _) in CASES.items()}
    finally:
        compiler.close()
    table = _table("grammar", "compile ms", "first us", "one: median", "90%", f"{batch}: median", "90%", "by clock")
    for name, (_, text) in CASES.items():
        grammar, compile_ms = compiled[name]
        tokens = tokenizer.encode(text).ids
        first = min(_timed(lambda g=grammar: _mask(g.start(), vocabulary.words)) for _ in range(3))  # type: ignore[misc]
        _, single = _walk([grammar.start()], tokens, vocabulary.words, 1)
        passed, worked = _walk([grammar.start() for _ in range(batch)], tokens, vocabulary.words, threads)
        figures = [*_figures(single), *_figures(worked), _figures(passed)[0]]
        table.add_row(name, f"{compile_ms:.1f}", f"{first:.0f}", *figures)
    console.print(table)
    console.print(f"Masks of one request and of {batch}: microseconds of processor; by clock: median of {batch}.")
    if torch.cuda.is_available():
        console.print(f"copy of {batch} masks to the device: {_copied(batch, vocabulary.words):.0f} us")
    console.print("A step waits for masks only where a batch takes longer than the forward pass.")
    if not steps:
        return
    by_clock, by_processor = (_table("grammar", "free ms", "bound ms", "longer", "half of pairs") for _ in range(2))
    for name, (_, text) in CASES.items():
        timed = GrammarSteps(batch, vocab_size, layers, hidden_size, where, threads)
        pairs = timed.compare(compiled[name][0], tokenizer.encode(text).ids, steps)
        timed.close()
        by_clock.add_row(name, *pairs.cells(lambda step: step.ms))
        by_processor.add_row(name, *pairs.cells(lambda step: step.processor_ms))
    console.print("decode steps, by the clock", by_clock, "decode steps, time of processors", by_processor, sep="\n")
    console.print("longer: the median of pairs of steps without and with grammars that follow on each other.")
    console.print(str(this_machine()))


def _table(*headings: str) -> Table:
    """A table that is readable at 80 columns."""
    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", no_wrap=number == 0)
    return table


def _compiled(compiler: GrammarCompiler, structure: Structure) -> tuple[CompiledGrammar, float]:
    """A grammar, and the milliseconds from its message to its first mask's being ready."""
    # Every process is ready once it has answered something.
    for number in range(8):
        compiler.submit(Grammar(structure=Regex(pattern=f"{number}"))).result()
    began = time.perf_counter()
    grammar = compiler.submit(Grammar(structure=structure)).result()
    return grammar, (time.perf_counter() - began) * 1e3


def _walk(
    states: Sequence[GrammarState], tokens: Sequence[int], words: int, threads: int | None
) -> tuple[list[float], list[float]]:
    """Microseconds of each step, that pass and that processors work: taking a token of each request and writing all
    masks."""
    writer = MaskWriter(len(states), words, torch.cuda.is_available(), threads)
    # Each request is at another token.
    at = [index * len(tokens) // len(states) for index in range(len(states))]
    for state, start in zip(states, at, strict=True):
        for token_id in tokens[:start]:
            state.advance(token_id)
    passed, worked = [], []
    for _ in range(min(_STEPS, len(tokens))):
        began, work_began = time.perf_counter(), time.process_time()
        for index, state in enumerate(states):
            if at[index] < len(tokens):
                state.advance(tokens[at[index]])
                at[index] += 1
        masks = writer.write(states)
        passed.append((time.perf_counter() - began) * 1e6)
        worked.append((time.process_time() - work_began) * 1e6)
        assert not masks.failed, masks.failed
    return passed, worked


def _mask(state: GrammarState, words: int) -> None:
    state.fill(np.zeros(words, dtype=np.int32))


def _timed(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1e6


def _copied(batch: int, words: int) -> float:
    source = torch.zeros((batch, words), dtype=torch.int32, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    spent = []
    for _ in range(50):
        torch.cuda.synchronize()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        spent.append((time.perf_counter() - began) * 1e6)
    return float(np.median(spent))


def _figures(spent: Sequence[float]) -> list[str]:
    """Median and 90th percentile."""
    return [f"{figure:.0f}" for figure in np.percentile(spent, (50, 90))]


if __name__ == "__main__":
    run(main)
