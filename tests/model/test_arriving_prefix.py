"""KV of earlier positions may come while the pass behind it computes: each layer's as late as in `on_layer`."""

import torch
from model_caches import PagedPool, PagedRequest

from model.passes import PrefillChunk
from model.sparse_model import SparseModel

PROMPT = torch.randint(0, 256, (121,), generator=torch.Generator().manual_seed(7))
PREFIX, COMPUTED = 80, 120


def test_a_layer_of_the_prefix_is_read_after_on_layer_has_returned(drafting: SparseModel) -> None:
    """Rows that nothing was written to are NaN, so what is read too early is seen."""
    spec = drafting.spec
    there, here = (PagedPool(spec, num_pages=8, page_size=16) for _ in range(2))
    whole, late = PagedRequest(there, COMPUTED), PagedRequest(here, COMPUTED)
    for start, stop in ((0, PREFIX), (PREFIX, COMPUTED)):
        drafting.prefill([PrefillChunk.of(PROMPT, start, stop, whole)])
    rows = late.rows(0, PREFIX)
    assert torch.equal(rows, whole.rows(0, PREFIX))

    def bring(layer: int) -> None:
        here.kv[layer, rows] = there.kv[layer, rows]
        group = spec.index_layer_of[layer]
        if spec.index_layer_of.index(group) == layer:
            here.keys[group, rows] = there.keys[group, rows]

    drafting.prefill([PrefillChunk.of(PROMPT, PREFIX, COMPUTED, late)], bring)
    assert torch.equal(here.kv, there.kv)
    assert torch.equal(here.keys, there.keys)
