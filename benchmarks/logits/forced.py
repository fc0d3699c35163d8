"""Logits of a served model, teacher-forced: a prompt in chunks, and then decode steps of several of its tokens."""

from collections.abc import Sequence

import torch

from kernels.operands import PagedKeys
from model.config import ModelSpec
from model.passes import PrefillChunk
from model.sparse_model import SparseModel

_PAGE_SIZE = 64
_NAN = 0xFF
"""In every format."""


class Text:
    """The prefill and the decode cache of one text, whose rows are its positions.

    A decode step has consecutive tokens of the text as if they were requests: all store their KV before any attends,
    and each reads as far as its own position. So a step of 64 needs one text and not 64.
    """

    def __init__(self, spec: ModelSpec, length: int, device: torch.device) -> None:
        layout = spec.kv_layout
        capacity = -(-length // _PAGE_SIZE) * _PAGE_SIZE

        def nothing(layers: int, num_bytes: int) -> torch.Tensor:
            return torch.full((layers, capacity, num_bytes), _NAN, dtype=torch.uint8, device=device)

        self._kv = nothing(layout.num_layers, layout.item_bytes)
        self._keys = nothing(layout.num_index_layers, layout.index_key_bytes)
        self.positions = torch.arange(0, device=device)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return torch.arange(start, stop, device=self._kv.device)

    def kv(self, layer: int) -> torch.Tensor:
        return self._kv[layer]

    def index_keys(self, index_layer: int) -> torch.Tensor:
        return self._keys[index_layer]

    def append(self, layer: int, items: torch.Tensor) -> None:
        self._kv[layer, self.positions] = items

    def append_index_keys(self, index_layer: int, keys: torch.Tensor) -> None:
        self._keys[index_layer, self.positions] = keys

    def index_pages(self, index_layer: int) -> PagedKeys:
        pages = self._keys[index_layer]
        pages = pages.view(-1, _PAGE_SIZE, pages.shape[1])
        table = torch.arange(len(pages), device=pages.device).repeat(len(self.positions), 1)
        return PagedKeys(pages, table, self.positions + 1)

    def swap_in(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        return positions


def forced_logits(model: SparseModel, token_ids: torch.Tensor, steps: Sequence[int], chunk: int) -> torch.Tensor:
    """Float32 logits [sum of steps, vocab_size] behind each of the last tokens of a text, int64 [T] on the device.

    steps: tokens of each decode step, the first ones first. chunk: tokens of a prompt's chunk.
    """
    prompt = len(token_ids) - sum(steps)
    text = Text(model.spec, len(token_ids), token_ids.device)
    for start in range(0, prompt, chunk):
        model.prefill([PrefillChunk.of(token_ids[: prompt + 1], start, min(start + chunk, prompt), text)])
    logits: list[torch.Tensor] = []
    begin = prompt
    for count in steps:
        text.positions = torch.arange(begin, begin + count, device=token_ids.device)
        logits.append(model.logits(model.decode(token_ids[begin : begin + count], text.positions, text)))
        begin += count
    return torch.cat(logits)
