"""A vocabulary of real size, trained on text that lies on the machine."""

from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

EOS = "<eos>"
_TEXT_BYTES = 16 * 2**20


def trained(vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most so many tokens, of the Python sources of installed packages."""
    texts, size = [], 0
    for path in sorted(Path(np.__file__).parents[1].rglob("*.py")):
        texts.append(path.read_text(errors="ignore"))
        size += len(texts[-1])
        if size > _TEXT_BYTES:
            break
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=64,
    )
    made.train_from_iterator(texts, trainer)
    made.add_special_tokens([AddedToken(EOS, special=True, normalized=False)])
    return made
