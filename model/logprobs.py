"""Log probabilities of given tokens, and of the likeliest ones, by the hidden states before them."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

SLICE_BYTES = 64 << 20
"""Float32 logits that are computed at a time: those of a whole chunk would take a gigabyte."""


class TokenLogprobs(NamedTuple):
    """Log probabilities after softmax over the vocabulary, on the model's device.

    own: float32 [n], of the given tokens. ranks: int32 [n], 1 for the likeliest token; equally likely tokens share the
    best rank. top: float32 [n, k], of the likeliest tokens, from the likeliest on. top_ids: int32 [n, k].
    """

    own: torch.Tensor
    ranks: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


def token_logprobs(normed: torch.Tensor, head: torch.Tensor, token_ids: torch.Tensor, count: int) -> TokenLogprobs:
    """How likely tokens are behind hidden states, and which `count` tokens are the likeliest.

    normed: [n, hidden_size], after the last norm. head: [vocab_size, hidden_size]. token_ids: int64 [n].
    No more than SLICE_BYTES of logits exist at a time, but at least those of one row.
    """
    rows = max(1, SLICE_BYTES // (4 * head.shape[0]))
    slices = zip(torch.split(normed, rows), torch.split(token_ids, rows), strict=True)
    parts = [_of_logits(F.linear(part, head).float(), ids, count) for part, ids in slices]
    return TokenLogprobs(*map(torch.cat, zip(*parts, strict=True)))


def _of_logits(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> TokenLogprobs:
    log_total = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    best = logits.topk(min(count, logits.shape[1]), dim=-1)
    return TokenLogprobs(
        own=(chosen - log_total).squeeze(1),
        ranks=(logits > chosen).sum(dim=-1, dtype=torch.int32) + 1,
        top=best.values - log_total,
        top_ids=best.indices.int(),
    )
