"""One step of the running requests: what the scheduler asks for, and the plain way to carry it out."""

from collections.abc import Sequence
from typing import Protocol

import torch

from hisparse.coordinator import HiSparseCoordinator
from model.sparse_model import SparseModel


class Decoding(Protocol):
    """Computes one token of each request of a batch."""

    def step(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> torch.Tensor:
        """Store the KV of each request's newest token, `token_ids`, and count it as the coordinator does.

        All requests must be ready. Returns float32 logits [batch, vocab_size], which the next step may overwrite.
        """
        ...


class EagerDecoding:
    """Launches a step's kernels one by one."""

    def __init__(self, model: SparseModel, coordinator: HiSparseCoordinator) -> None:
        self._model = model
        self._coordinator = coordinator

    def step(self, request_ids: Sequence[str], token_ids: Sequence[int]) -> torch.Tensor:
        step = self._coordinator.begin_step(request_ids)
        newest = self._coordinator.device.upload(token_ids)
        logits = self._model.decode(newest, step.seq_lens - 1, step)
        self._coordinator.finish_step(step)
        return logits
