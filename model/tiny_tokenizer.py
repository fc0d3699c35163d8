"""The tokenizer of tiny checkpoints: bytes, or a vocabulary of real size learned from text that every machine has."""

import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
BEGIN_ID, END_ID = 256, 257
BYTE_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)

CHAT_TEMPLATE = (
    "<|begin|>{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_MOST_TEXT_BYTES = 16 << 20
_TEXT_BYTES_PER_TOKEN = 256


def tiny_tokenizer(vocab_size: int = BYTE_VOCAB_SIZE) -> Tokenizer:
    """Ids below 256 are the bytes of the text's UTF-8, and then come SPECIAL_TOKENS; further ones are merges.

    The merges are a byte-level BPE (Sennrich et al., arXiv:1508.07909) of the Python sources of installed packages, so
    other packages give others. There may be fewer of them than asked for: some 71,000 is what 16 MiB of sources have.
    """
    ids = {character: byte for byte, character in bytes_to_unicode().items()}
    merges = _merges(vocab_size - BYTE_VOCAB_SIZE) if vocab_size > BYTE_VOCAB_SIZE else []
    if merges:
        ids |= {token: 256 + number for number, token in enumerate(SPECIAL_TOKENS)}
        ids |= {first + second: BYTE_VOCAB_SIZE + number for number, (first, second) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=bool(merges))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def with_template(tokenizer: Tokenizer, max_length: int) -> PreTrainedTokenizerFast:
    """As a checkpoint has it. max_length: of a prompt, in tokens."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
        chat_template=CHAT_TEMPLATE,
    )


def _merges(count: int) -> list[tuple[str, str]]:
    """At most so many merges, the most frequent first. A small vocabulary needs little text."""
    texts, missing = [], min(_MOST_TEXT_BYTES, _TEXT_BYTES_PER_TOKEN * (256 + count))
    for path in sorted(Path(torch.__file__).parents[1].rglob("*.py")):
        texts.append(path.read_text(errors="ignore")[:missing])
        missing -= len(texts[-1])
        if missing <= 0:
            break
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=256 + count,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=64,
    )
    learned.train_from_iterator(texts, trainer)
    return [(first, second) for first, second in json.loads(learned.to_str())["model"]["merges"]]
