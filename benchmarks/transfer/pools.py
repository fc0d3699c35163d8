"""The pools of both sides: those of the nodes, with items of plain bytes and without index keys."""

import numpy as np
import torch
import xxhash

from kvcache.layout import KVLayout
from transfer.memory import BufferInfo
from transfer.planner import Int64s


def layout(layers: int, item_bytes: int) -> KVLayout:
    """Items of `item_bytes` bytes in so many layers."""
    return KVLayout((0,) * layers, item_bytes, index_key_bytes=0)


def buffers_of(kv: torch.Tensor) -> BufferInfo:
    """One buffer per layer of kv, uint8 [layers, rows, item_bytes]."""
    layers = kv.unbind(0)
    return BufferInfo(
        ptrs=tuple(layer.data_ptr() for layer in layers),
        lengths=tuple(layer.nbytes for layer in layers),
        item_lengths=(kv.shape[2],) * len(layers),
    )


def fill(kv: torch.Tensor, seed: int) -> None:
    """Random bytes, other ones in every layer and row, so that an item in the wrong place is noticed."""
    layers = kv.numpy()
    words = -(-layers[0].size // 8)
    noise = np.random.default_rng(seed).integers(0, 2**64, words, dtype=np.uint64).view(np.uint8)[: layers[0].size]
    for number, layer in enumerate(layers):
        np.add(noise.reshape(layer.shape), np.uint8(number % 256), out=layer)


def digests(kv: torch.Tensor, rows: Int64s) -> tuple[int, ...]:
    """xxh3 of those rows, in that order, layer by layer. Raises IndexError for a row that is not there."""
    return tuple(xxhash.xxh3_64_intdigest(layer[rows]) for layer in kv.numpy())
