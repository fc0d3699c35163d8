"""Blocks of token ids, packed to as few bits as the vocabulary needs: what the prefix cache compares."""

import numpy as np
import numpy.typing as npt

from base.block_hashes import BLOCK_TOKENS

PackedBlocks = npt.NDArray[np.uint64]
"""[blocks, words]: one row per block; rows are equal exactly if the token ids are."""

_LOW_BITS = 16
_LOW_WORDS = BLOCK_TOKENS * _LOW_BITS // 64


class TokenPacking:
    """Packs token ids below `vocab_size` without loss.

    A row begins with the low 16 bits of the 64 ids. Behind them is one word for each further bit of an id: that bit of
    all 64. So a block takes 136 bytes with up to 2^17 tokens in the vocabulary and 144 with up to 2^18, where int32
    takes 256.
    """

    def __init__(self, vocab_size: int) -> None:
        if not 0 < vocab_size <= 2**31:
            raise ValueError(f"vocab_size is {vocab_size}, must be 1 to 2^31")
        self.vocab_size = vocab_size
        self._high_bits = max(0, (vocab_size - 1).bit_length() - _LOW_BITS)
        self.words = _LOW_WORDS + self._high_bits

    @property
    def block_bytes(self) -> int:
        return 8 * self.words

    def pack(self, tokens: npt.NDArray[np.integer]) -> PackedBlocks:
        """The whole blocks that `tokens`, ids [n], begins with: [n // 64, words].

        Raises ValueError for an id outside of the vocabulary, which would look like another one.
        """
        blocks = len(tokens) // BLOCK_TOKENS
        ids = np.ascontiguousarray(tokens[: blocks * BLOCK_TOKENS]).reshape(blocks, BLOCK_TOKENS)
        packed = np.empty((blocks, self.words), dtype=np.uint64)
        if not blocks:
            return packed
        least, greatest = int(ids.min()), int(ids.max())
        if least < 0 or greatest >= self.vocab_size:
            wrong = least if least < 0 else greatest
            raise ValueError(f"token id {wrong} is not in the vocabulary of {self.vocab_size} tokens")
        packed[:, :_LOW_WORDS].view(np.uint16)[:] = ids & 0xFFFF
        for bit in range(self._high_bits):
            plane = np.packbits((ids >> (_LOW_BITS + bit)) & 1 != 0)
            packed[:, _LOW_WORDS + bit] = plane.view(np.uint64)
        return packed
