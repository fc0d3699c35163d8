"""The model that both sides of the overlap measurement agree on: shapes of DeepSeek-V3.2's KV, and no weights."""

import time
from collections.abc import Callable, Sequence

import torch

from model.config import ModelSpec
from model.passes import PrefillChunk

LAYERS = 8
VOCAB = 16


def spec(tokens: int) -> ModelSpec:
    """Items of 1152 B and an index key of 256 B in each of LAYERS layers, prompts of up to `tokens` tokens."""
    return ModelSpec(
        model_type="benchmark",
        num_layers=LAYERS,
        index_layer_of=tuple(range(LAYERS)),
        item_dim=576,
        latent_dim=512,
        index_dim=128,
        index_topk=2048,
        vocab_size=VOCAB,
        context_length=tokens + 64,
        dtype=torch.bfloat16,
        fingerprint="benchmark",
    )


class SleepingModel:
    """Takes its time for every layer, and leaves the pool as it is.

    The sleep stands for a device that computes while this machine's cores are free to send. What it would have
    computed lies in the pool from the start, so the checksums of what arrives hold.
    """

    def __init__(self) -> None:
        self.seconds_per_layer = 0.0
        self.computed_at = 0.0
        """When the last layer of the last pass was computed (time.monotonic)."""

    def prefill(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None], kv_only: bool) -> None:
        """Sleep for each layer, and call `on_layer` with its number."""
        for layer in range(LAYERS):
            if self.seconds_per_layer:
                time.sleep(self.seconds_per_layer)
            self.computed_at = time.monotonic()
            on_layer(layer)
