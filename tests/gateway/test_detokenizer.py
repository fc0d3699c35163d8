"""Incremental text equals the text of all tokens at once, however it is cut."""

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.detokenizer import ByteDetokenizer, StopMatcher, TokenBytes, WindowDetokenizer
from tests.gateway.world import byte_tokenizer

BYTES = byte_tokenizer()


UNKNOWN = 99_999
EOS = 257


def chunky_tokenizer() -> Tokenizer:
    """Byte level, with merges that cross characters: a token may end in one character and begin in another."""
    tokenizer = byte_tokenizer()
    ids = {token: i for token, i in tokenizer.get_vocab().items() if i < 256}
    pairs = [("ä", "½"), ("½", "ł"), ("Ġ", "a"), ("Ł", "ĺ"), ("ł", "å"), ("©", "Ã")]
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


def special_ids(tokenizer: Tokenizer) -> set[int]:
    return {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def skips_of(tokenizer: Tokenizer) -> Callable[[int], bool]:
    special = special_ids(tokenizer)
    return lambda token_id: token_id in special or tokenizer.id_to_token(token_id) is None


def detokenizers_of(tokenizer: Tokenizer) -> list[WindowDetokenizer | ByteDetokenizer]:
    """All that the tokenizer may have."""
    window = WindowDetokenizer(lambda ids: decode_with(tokenizer, ids), skips_of(tokenizer))
    token_bytes = TokenBytes(tokenizer)
    return [window, *([ByteDetokenizer(token_bytes.of, special_ids(tokenizer))] if token_bytes.make_text else [])]


def incremental(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    texts = {"".join(map(each.push, ids)) + each.finish() for each in detokenizers_of(tokenizer)}
    assert len(texts) == 1
    return texts.pop()


@given(st.text(max_size=60))
@example("你好世界 " * 12)
@example("a�" * 20)
def test_any_text(text: str) -> None:
    for tokenizer in (BYTES, CHUNKY):
        ids = tokenizer.encode(text).ids
        assert incremental(tokenizer, ids) == text


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    for detokenizer in detokenizers_of(BYTES):
        assert [detokenizer.push(b) for b in "h你!".encode()] == ["h", "", "", "你", "!"]


@given(st.lists(st.one_of(st.sampled_from([EOS, UNKNOWN, *"né你🙂 ".encode()]), st.integers(0, 310)), max_size=120))
@example([0x80] * 60)
@example([0xE4] * 40 + [0xBD, 0xA0])
@example([256] * 30 + [0xE4, 0xBD, 256, 0xA0])
@example([EOS] * 60 + list(b"ab"))
@example([0xE4] + [EOS, UNKNOWN] * 40 + [0xBD, 0xA0])
@example([0xC3] + [305] * 60 + [0xA9])
@example([305] * 60)
def test_any_mix_of_text_special_and_unknown_tokens(ids: list[int]) -> None:
    for tokenizer in (BYTES, CHUNKY):
        assert incremental(tokenizer, ids) == decode_with(tokenizer, ids)


@given(st.lists(st.sampled_from([UNKNOWN, *range(256, 263), tuple("é好🙂".encode())]), max_size=120))
@example([256] + [UNKNOWN] * 60 + [256, 256])
@example([UNKNOWN] * 60 + [256, 256])
def test_a_space_survives_tokens_without_text(parts: list[int | tuple[int, ...]]) -> None:
    ids = [i for part in parts for i in (part if isinstance(part, tuple) else (part,))]
    assert incremental(SENTENCEPIECE, ids) == decode_with(SENTENCEPIECE, ids)


TEXT = list("Die Größe 你好🙂 ".encode())
LONG_RUNS = {
    "special": [EOS] * 500,
    "unknown": [UNKNOWN] * 500,
    "special after half a character": [0xE4] + [EOS] * 500,
    "special after text": TEXT + [EOS] * 500,
    "garbage": [0x80] * 500,
    "beginnings of characters": [0xE4] * 500,
    "text": TEXT * 20,
    "text and special": [i for byte in TEXT * 20 for i in (byte, EOS)],
}


@pytest.mark.parametrize(
    ("ids", "skips", "most"),
    [
        *((ids, skips_of(BYTES), 2) for ids in LONG_RUNS.values()),
        (TEXT + [EOS] * 500 + TEXT, lambda token_id: False, 6),
    ],
    ids=[*LONG_RUNS, "tokens without text that are not skipped"],
)
def test_a_token_costs_the_same_in_a_long_answer(ids: list[int], skips: Callable[[int], bool], most: int) -> None:
    sizes: list[int] = []

    def decode(window: Sequence[int]) -> str:
        sizes.append(len(window))
        return decode_with(BYTES, window)

    detokenizer = WindowDetokenizer(decode, skips)
    text = "".join([detokenizer.push(token_id) for token_id in ids]) + detokenizer.finish()
    assert text == decode_with(BYTES, ids)
    assert max(sizes, default=0) <= 33
    assert len(sizes) <= most * len(ids)


def reference_cut(text: str, stops: Sequence[str]) -> str:
    """Cut before the stop string that ends first, the longest of those."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@settings(max_examples=200)
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
    assert (matcher.stop is not None) == (reference_cut(text, stops) != text or any(stop in text for stop in stops))


@pytest.mark.parametrize(("pieces", "shown"), [(["x", "E", "N", "D"], ["x", "", "", ""]), (["EN", "E"], ["", "EN"])])
def test_a_possible_beginning_of_a_stop_string_is_held_back(pieces: list[str], shown: list[str]) -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in pieces] == shown


@pytest.mark.parametrize("cut", range(7))
def test_a_stop_string_may_be_a_part_of_the_text(cut: int) -> None:
    matcher = StopMatcher(["END"], includes_stop=True)
    text = "a ENDx"
    assert matcher.push(text[:cut]) + matcher.push(text[cut:]) == "a END"
    assert matcher.stop == "END"


def test_a_stop_string_before_it_may_end_the_text_is_text() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("a END b", ends=False) == "a END b"
    assert matcher.push(" E", ends=False) == " "
    assert matcher.push("ND c", ends=True) == ""
    assert matcher.stop == "END"


def test_every_byte_of_a_byte_level_vocabulary() -> None:
    spelled = TokenBytes(byte_tokenizer())
    assert spelled.make_text
    assert [spelled.of(byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert spelled.of(EOS) == b"<eos>"
    assert spelled.of(99_999) == b""


def test_tokens_that_cross_characters() -> None:
    tokenizer = chunky_tokenizer()
    spelled = TokenBytes(tokenizer)
    assert spelled.make_text
    text = "你好 aéé"
    assert b"".join(spelled.of(token_id) for token_id in tokenizer.encode(text).ids) == text.encode()


def test_bytes_that_sentencepiece_falls_back_on() -> None:
    spelled = TokenBytes(sentencepiece_like_tokenizer())
    assert not spelled.make_text
    assert spelled.of(0xE4) == b"\xe4"
    assert spelled.of(260) == b"cat"
