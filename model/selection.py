"""Which positions a query attends to: the top-k of the lightning indexer's scores.

Equal scores do occur (ReLU gives exact zeros), and torch.topk breaks ties in an order that depends on the length of
the row. To select the same positions as the reference, a row has the length that it has there: the whole prompt for a
query of the prompt, the sequence so far for a decoded token.
"""

import torch

from model.cache import IndexPages
from model.indexer import IndexInputs

# Bounds the per-head scores of one block of queries, so that memory is linear in the length of the context.
SCORE_BLOCK_BYTES = 64 << 20


def select_for_prompt(index: IndexInputs, keys: torch.Tensor, start: int, prompt_len: int, topk: int) -> torch.Tensor:
    """Select for the T queries at positions [start, start + T) of a prompt.

    keys: [start + T, index_dim], of all positions so far. Returns int64 positions [T, min(topk, prompt_len)], best
    first; -1 where a query has fewer positions before it.
    """
    num_queries, num_keys = len(index.queries), len(keys)
    keys = keys.float()
    block = max(1, SCORE_BLOCK_BYTES // (4 * index.queries.shape[1] * num_keys))
    key_positions = torch.arange(num_keys, device=keys.device)
    selections = []
    for begin in range(0, num_queries, block):
        end = min(begin + block, num_queries)
        query_positions = torch.arange(start + begin, start + end, device=keys.device).unsqueeze(1)
        scores = keys.new_full((end - begin, prompt_len), float("-inf"))
        scores[:, :num_keys] = _scores(index.queries[begin:end], index.head_weights[begin:end], keys)
        scores[:, :num_keys].masked_fill_(key_positions > query_positions, float("-inf"))
        selected = scores.topk(min(topk, prompt_len), dim=-1).indices
        selections.append(selected.masked_fill_(selected > query_positions, -1))
    return torch.cat(selections)


def select_for_decode(index: IndexInputs, pages: IndexPages, topk: int) -> torch.Tensor:
    """Select for one query of each request of a batch, over the request's whole sequence.

    Returns int64 positions [batch, min(topk, longest sequence)], best first; -1 where a sequence is shorter. Each row
    is scored over exactly its own length.
    """
    lengths = pages.lengths
    page_size = pages.keys.shape[1]
    selections = pages.page_table.new_full((len(lengths), min(topk, max(lengths))), -1)
    for row, length in enumerate(lengths):
        page_ids = pages.page_table[row, : -(-length // page_size)]
        keys = pages.keys[page_ids].flatten(0, 1)[:length].float()
        scores = _scores(index.queries[row : row + 1], index.head_weights[row : row + 1], keys)
        selected = scores.topk(min(topk, length), dim=-1).indices
        selections[row, : selected.shape[1]] = selected[0]
    return selections


def _scores(queries: torch.Tensor, head_weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """sum over heads of weight * relu(q . k / sqrt(dim)), in float32, for every pair: [num_queries, num_keys]."""
    num_queries, num_heads, dim = queries.shape
    per_head = queries.float().flatten(0, 1) @ keys.T
    per_head = per_head.mul_(dim**-0.5).relu_().view(num_queries, num_heads, len(keys))
    return torch.bmm(head_weights.unsqueeze(1), per_head).squeeze(1)
