"""Vocabularies of other tokenizers, and those that cannot be used."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from control.grammar import Grammar, TextChoice
from engine.grammar import UnsupportedTokenizer
from engine.grammar.proofs import Proofs
from engine.grammar.state import CompiledGrammar
from engine.grammar.vocabulary import Vocabulary
from tests.engine.grammar.small import EOS, PADDED, SIZE, allowed, id_of, tokenizer


def test_tokens_that_only_the_configuration_has_are_known(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer().to_str())
    extra = {str(SIZE): {"content": "<extra>", "special": False}, str(id_of(EOS)): {"content": EOS, "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": extra}))
    known = Vocabulary.load(tmp_path, PADDED, [id_of(EOS)])
    assert known.added_tokens[SIZE] == "<extra>"
    assert known.words == -(-PADDED // 32)
    text, _ = Proofs(PADDED, known.added_tokens, known.stop_token_ids).prove(
        Grammar(structure=TextChoice(options=("<extra>",)))
    )
    assert allowed(CompiledGrammar(known, text).start()) == {SIZE}


def sentencepiece_like() -> dict[str, Any]:
    """Pieces with a mark for the space, and bytes for what has no piece."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges, byte_fallback=True, unk_token="<unk>"
    )
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<s>", "</s>", "<unk>"])
    content: dict[str, Any] = json.loads(made.to_str())
    return content


def test_a_vocabulary_with_byte_fallback() -> None:
    known = Vocabulary(sentencepiece_like(), 320, [2])
    text, _ = Proofs(320, known.added_tokens, known.stop_token_ids).prove(
        Grammar(structure=TextChoice(options=("a ab", "☃")))
    )
    state = CompiledGrammar(known, text).start()
    pieces = sentencepiece_like()["model"]["vocab"]
    assert allowed(state) == {pieces["a"], pieces["<0x61>"], pieces["<0xE2>"]}
    state.advance(pieces["a"])
    # Where the text is certain, the tokens are those that the tokenizer would make of it.
    assert allowed(state) == {pieces["▁ab"]}
    state.advance(pieces["▁ab"])
    assert allowed(state) == {2}


@pytest.mark.parametrize(
    ("content", "stops", "message"),
    [
        ({}, [1], "cannot use this tokenizer"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, [], "need end-of-sequence tokens"),
        ({"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}, [900], "below 848"),
        ({"model": {"type": "BPE", "vocab": {"a": 900}, "merges": []}}, [1], "cannot use this tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_used(content: dict[str, Any], stops: list[int], message: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=message):
        Vocabulary(content, PADDED, stops)


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedTokenizer, match="cannot read the tokenizer"):
        Vocabulary.load(tmp_path, PADDED, [1])


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([], {}),
        ({"added_tokens": [{"content": "<x>"}]}, {}),
        ({"added_tokens": 7}, {}),
        ({}, []),
        ({}, {"<x>": {"content": "<x>"}}),
        ({}, {"300": "<x>"}),
    ],
)
def test_files_of_other_shapes_are_no_tokenizer(tmp_path: Path, content: object, named: object) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    with pytest.raises(UnsupportedTokenizer, match="cannot"):
        Vocabulary.load(tmp_path, PADDED, [1])
