"""Incremental text equals the text of all tokens at once, however it is cut."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.detokenizer import Detokenizer, StopMatcher
from tests.gateway.fakes import byte_tokenizer

BYTES = byte_tokenizer()


def chunky_tokenizer() -> Tokenizer:
    """Byte level, with merges that cross characters: a token may end in one character and begin in another."""
    tokenizer = byte_tokenizer()
    ids = {token: i for token, i in tokenizer.get_vocab().items() if i < 256}
    pairs = [("ä", "½"), ("½", "ł"), ("Ġ", "a"), ("Ł", "ĺ"), ("ł", "å")]
    pairs = [(a, b) for a, b in pairs if a in ids and b in ids]
    vocab = ids | {a + b: 300 + i for i, (a, b) in enumerate(pairs)}
    chunky = Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    chunky.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    chunky.decoder = decoders.ByteLevel()
    return chunky


def sentencepiece_like_tokenizer() -> Tokenizer:
    """Words with a leading space that decoding drops at the start, and bytes for what is no word."""
    words = ["▁the", "▁a", "s", "▁", "cat", "▁你", "好"]
    vocab = {f"<0x{b:02X}>": b for b in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return tokenizer


CHUNKY = chunky_tokenizer()
SENTENCEPIECE = sentencepiece_like_tokenizer()


def decode_with(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)


def incremental(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    detokenizer = Detokenizer(lambda window: decode_with(tokenizer, window))
    return "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.finish()


@settings(deadline=None)
@given(st.text(max_size=60))
@example("你好世界 " * 12)
@example("a�" * 20)
def test_any_text(text: str) -> None:
    for tokenizer in (BYTES, CHUNKY):
        ids = tokenizer.encode(text).ids
        assert incremental(tokenizer, ids) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 257), max_size=80))
@example([0x80] * 60)
@example([0xE4] * 40 + [0xBD, 0xA0])
@example([256] * 30 + [0xE4, 0xBD, 256, 0xA0])
def test_any_byte_tokens_valid_or_not(ids: list[int]) -> None:
    assert incremental(BYTES, ids) == decode_with(BYTES, ids)


@settings(deadline=None)
@given(st.lists(st.sampled_from([*range(256, 263), *[tuple("é好🙂".encode())]]), max_size=60))
def test_tokenizers_that_drop_a_leading_space(parts: list[int | tuple[int, ...]]) -> None:
    ids = [i for part in parts for i in (part if isinstance(part, tuple) else (part,))]
    assert incremental(SENTENCEPIECE, ids) == decode_with(SENTENCEPIECE, ids)


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    detokenizer = Detokenizer(lambda window: decode_with(BYTES, window))
    assert [detokenizer.push(b) for b in "h你!".encode()] == ["h", "", "", "你", "!"]


def test_the_window_stays_small_on_endless_garbage() -> None:
    longest = 0

    def decode(window: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(window))
        return decode_with(BYTES, window)

    detokenizer = Detokenizer(decode)
    text = "".join(detokenizer.push(0x80) for _ in range(500))
    assert len(text) > 450
    assert longest <= 33


def reference_cut(text: str, stops: Sequence[str]) -> str:
    """Cut before the stop string that ends first, the longest of those."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=200, deadline=None)
@given(
    st.text(alphabet="abc", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=6),
)
def test_stop_strings_cut_alike_however_the_text_arrives(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    borders = [0, *sorted(cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(borders)] if text else []
    out = "".join([matcher.push(piece) for piece in pieces])
    assert out + matcher.finish() == reference_cut(text, stops)
    assert matcher.matched == (reference_cut(text, stops) != text or any(stop in text for stop in stops))


@pytest.mark.parametrize(("pieces", "shown"), [(["x", "E", "N", "D"], ["x", "", "", ""]), (["EN", "E"], ["", "EN"])])
def test_a_possible_beginning_of_a_stop_string_is_held_back(pieces: list[str], shown: list[str]) -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in pieces] == shown
