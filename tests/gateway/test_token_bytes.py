"""What tokens are made of, in the two ways in which vocabularies spell bytes."""

from gateway.detokenizer import TokenBytes
from tests.gateway.fakes import EOS, byte_tokenizer
from tests.gateway.test_detokenizer import chunky_tokenizer, sentencepiece_like_tokenizer


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
