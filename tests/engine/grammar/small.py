"""A small vocabulary, and a model of random numbers that writes under masks."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from control.grammar import Grammar, Structure
from engine.grammar.proofs import Proofs
from engine.grammar.state import CompiledGrammar, GrammarState
from engine.grammar.vocabulary import Vocabulary

BOS, EOS, END_OF_THINKING, TOOL_CALL, END_OF_CALL = "<bos>", "<eos>", "</think>", "<tool_call>", "</tool_call>"
SIZE = 800
PADDED = 848
"""Rows of the logits: more than tokens."""
_ROOT = Path(__file__).parents[3]


@cache
def tokenizer() -> Tokenizer:
    """A byte-level BPE, trained on what does not change: random answers are the same ones each time."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - 5, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [(_ROOT / "LICENSE").read_text()]
    texts += ['{"name": "value", "items": [1, 2.5, true, null], "more": {"a": "b"}}\n'] * 200
    trained.train_from_iterator(texts, trainer)
    trained.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in (BOS, EOS)])
    trained.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in (END_OF_THINKING, TOOL_CALL, END_OF_CALL)]
    )
    return trained


def id_of(text: str) -> int:
    """The id of an added token."""
    token_id = tokenizer().token_to_id(text)
    assert token_id is not None
    return int(token_id)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(json.loads(tokenizer().to_str()), PADDED, [id_of(EOS)])


@cache
def proofs() -> Proofs:
    known = vocabulary()
    return Proofs(known.vocab_size, known.added_tokens, known.stop_token_ids)


def compiled(structure: Structure, after: str | None = None) -> CompiledGrammar:
    """A grammar, proved in this process. Raises GrammarError."""
    return CompiledGrammar(vocabulary(), proofs().prove(Grammar(structure=structure, after=after))[0])


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text).ids)


def decode(token_ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(token_ids), skip_special_tokens=False))


def allowed(state: GrammarState) -> set[int]:
    """The tokens that a state allows."""
    row = np.zeros(state.words, dtype=np.int32)
    state.fill(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def accepts(state: GrammarState, text: str) -> bool:
    """Whether a state allows a text's tokens and then an end. Moves the state as far as it goes."""
    for token_id in encode(text):
        if token_id not in allowed(state):
            return False
        state.advance(token_id)
    return id_of(EOS) in allowed(state)


def write(state: GrammarState, rng: np.random.Generator, most: int) -> tuple[list[int], bool]:
    """Tokens drawn at temperature 1 from random logits under a state's masks, and whether they are a whole answer."""
    row = np.zeros(vocabulary().words, dtype=np.int32)
    written: list[int] = []
    while len(written) < most:
        state.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:PADDED].astype(bool)
        logits = np.where(bits, rng.standard_normal(PADDED) + rng.gumbel(size=PADDED), -np.inf)
        token_id = int(logits.argmax())
        if token_id == id_of(EOS):
            return written, True
        state.advance(token_id)
        written.append(token_id)
    return written, state.done
