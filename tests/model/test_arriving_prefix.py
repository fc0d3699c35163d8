"""KV of earlier positions may come while the pass behind it computes: each layer's as late as in `on_layer`."""

import torch
from model_caches import PagedPool, PagedRequest

from model.passes import PrefillChunk
from model.sparse_model import SparseModel

PROMPT = torch.randint(0, 256, (120,), generator=torch.Generator().manual_seed(7))
PREFIX = 80


def test_a_layer_of_the_prefix_is_read_after_on_layer_has_returned(model: SparseModel) -> None:
    """Rows that nothing was written to are NaN, so what is read too early is seen."""
    spec = model.spec
    there, here = (PagedPool(spec, num_pages=8, page_size=16) for _ in range(2))
    whole, late = PagedRequest(there, len(PROMPT)), PagedRequest(here, len(PROMPT))
    for start, stop in ((0, PREFIX), (PREFIX, len(PROMPT))):
        model.prefill([PrefillChunk(PROMPT[start:stop], start, len(PROMPT) + 1, whole)])
    rows = late.rows(0, PREFIX)
    assert torch.equal(rows, whole.rows(0, PREFIX))

    def bring(layer: int) -> None:
        here.kv[layer, rows] = there.kv[layer, rows]
        group = spec.index_layer_of[layer]
        if spec.index_layer_of.index(group) == layer:
            here.keys[group, rows] = there.keys[group, rows]

    model.prefill([PrefillChunk(PROMPT[PREFIX:], PREFIX, len(PROMPT) + 1, late)], bring)
    assert torch.equal(here.kv, there.kv)
    assert torch.equal(here.keys, there.keys)
