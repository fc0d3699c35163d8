"""Log probabilities of a prompt's tokens are those of transformers, however the prompt is cut."""

import pytest
import torch
from model_caches import Session
from transformers import PreTrainedModel

from model import sparse_model
from model.sparse_model import SparseModel, TokenLogprobs, token_logprobs

TOP = 20
PROMPT = torch.randint(0, 256, (301,), generator=torch.Generator().manual_seed(13))
"""One without near-ties at the border of the top-k, which processors decide differently in float32: weights that are
disturbed in their last bits change no log probability by more than 5e-6."""


def computed(model: SparseModel, cuts: list[int]) -> TokenLogprobs:
    """Of all tokens of the prompt but the first, computed in chunks that end there."""
    session = Session(model, [PROMPT], 1)
    parts = []
    for start, stop in zip([0, *cuts], [*cuts, len(PROMPT) - 1], strict=True):
        hidden = model.prefill([session.chunk(0, start, stop)], kv_only=False)
        parts.append(model.logprobs(hidden, PROMPT[start + 1 : stop + 1], TOP))
    return TokenLogprobs(*map(torch.cat, zip(*parts, strict=True)))


@pytest.mark.parametrize("cuts", [[], [1, 150]])
def test_they_are_those_of_transformers(model: SparseModel, reference: PreTrainedModel, cuts: list[int]) -> None:
    with torch.no_grad():
        expected = reference(PROMPT[None]).logits[0, :-1].float().log_softmax(dim=-1)
    found = computed(model, cuts)
    own = expected.gather(1, PROMPT[1:, None])
    torch.testing.assert_close(found.own, own.squeeze(1), atol=2e-4, rtol=0)
    torch.testing.assert_close(found.top, expected.topk(TOP).values, atol=2e-4, rtol=0)
    torch.testing.assert_close(expected.gather(1, found.top_ids.long()), found.top, atol=2e-4, rtol=0)
    # A rank may differ by those that are as likely within the tolerance.
    least, most = 1 + (expected > own + 4e-4).sum(1), 1 + (expected > own - 4e-4).sum(1)
    assert ((found.ranks >= least) & (found.ranks <= most)).all()


def test_the_kv_is_the_same_with_them(model: SparseModel) -> None:
    kept = []
    for kv_only in (True, False):
        session = Session(model, [PROMPT], 1)
        model.prefill([session.chunk(0, 0, len(PROMPT) - 1)], kv_only=kv_only)
        kept.append((session.pool.kv, session.pool.keys))
    assert torch.equal(kept[0][0], kept[1][0])
    assert torch.equal(kept[0][1], kept[1][1])


def test_logits_are_computed_in_slices(model: SparseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = computed(model, [])
    vocab = model.network.head.shape[0]
    monkeypatch.setattr(sparse_model, "SLICE_BYTES", 7 * 4 * vocab)
    seen: list[int] = []
    of_logits = sparse_model._of_logits

    def noted(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> TokenLogprobs:
        seen.append(len(logits))
        return of_logits(logits, token_ids, count)

    monkeypatch.setattr(sparse_model, "_of_logits", noted)
    sliced = computed(model, [])
    assert sum(seen) == 300
    assert max(seen) == 7
    torch.testing.assert_close(sliced.own, whole.own, atol=1e-5, rtol=0)
    assert torch.equal(sliced.top_ids, whole.top_ids)


def test_equally_likely_tokens_share_the_best_rank() -> None:
    found = token_logprobs(torch.ones(1, 1), torch.tensor([[1.0], [2.0], [1.0], [0.0]]), torch.tensor([2]), 1)
    assert (found.ranks.tolist(), found.top_ids.tolist()) == ([2], [[1]])
