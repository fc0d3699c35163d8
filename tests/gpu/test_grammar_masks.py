"""Masks reach the device as they were written, from pinned memory and without a wait."""

import numpy as np
import torch

from control.grammar import JSON_OBJECT, TextChoice
from engine.grammar.masks import MaskWriter
from tests.engine.grammar.small import PADDED, compiled, encode, vocabulary


def test_masked_logits_allow_what_the_grammar_allows() -> None:
    states = [compiled(JSON_OBJECT).start(), None, compiled(TextChoice(options=("yes", "no"))).start()]
    writer = MaskWriter(4, vocabulary().words, pinned=True)
    on_device = torch.empty((3, vocabulary().words), dtype=torch.int32, device="cuda")
    bits = torch.arange(PADDED, device="cuda")
    for text in "{}":
        masks = writer.write(states)
        assert masks.words is not None
        assert masks.words.is_pinned()
        on_device.copy_(masks.words, non_blocking=True)
        allowed = (on_device[:, bits // 32] >> (bits % 32)) & 1 == 1
        expected = np.unpackbits(masks.words.numpy().view(np.uint8), axis=1, bitorder="little")[:, :PADDED]
        assert torch.equal(allowed.cpu(), torch.from_numpy(expected.astype(bool)))
        assert bool(allowed[1].all())
        if (json_state := states[0]) is not None:
            json_state.advance(encode(text)[0])
