"""What transformers says: its own greedy generation, and whether an answer is what it would generate.

Prompts are computed in chunks: the library's index scores of all tokens of a long prompt, for each of the 32 heads,
take gigabytes a layer, and the system spends longer on handing that memory out than the processor on arithmetic.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

_CHUNK = 32
"""Tokens of a forward pass."""


def generate(network: Any, prompt_ids: Sequence[int], max_tokens: int, cache: DynamicCache | None = None) -> list[int]:
    """The greedy continuation of a prompt by a transformers model, by its generate(), with KV in an empty cache."""
    ids = torch.tensor([list(prompt_ids)])
    output = network.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_tokens,
        eos_token_id=None,
        prefill_chunk_size=_CHUNK,
        past_key_values=DynamicCache(config=network.config) if cache is None else cache,
    )
    return list(output[0, len(prompt_ids) :].tolist())


def likeliest(
    network: Any, prompt_ids: Sequence[int], answer: Sequence[int], cache: DynamicCache | None = None
) -> list[int]:
    """For each token of an answer, what a transformers model finds likeliest after the prompt and the tokens before it.

    It equals the answer if, and only if, the answer is the greedy continuation: the first token that is not is another
    one here. A whole answer costs no more than a prompt of its length, which is a small part of what generating costs.
    """
    found = _logits(network, [*prompt_ids, *answer[:-1]], cache).argmax(dim=-1)
    return list(found[len(prompt_ids) - 1 :].tolist())[: len(answer)]


def logprobs(network: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Log probabilities of all tokens behind each of these, float32 [tokens, vocabulary], by a transformers model."""
    return _logits(network, token_ids, None).float().log_softmax(dim=-1)


def _logits(network: Any, token_ids: Sequence[int], cache: DynamicCache | None) -> torch.Tensor:
    cache = DynamicCache(config=network.config) if cache is None else cache
    found = []
    with torch.inference_mode():
        for chunk in torch.tensor([list(token_ids)]).split(_CHUNK, dim=1):
            found.append(network(chunk, past_key_values=cache, use_cache=True).logits[0])
    return torch.cat(found)
