"""The byte audit finds what is wrong in a prefill node's cache, and nothing else."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from control.messages import FetchDone, Quiesced
from engine.chunked import ChunkedPrefill
from model.sparse_model import SparseModel
from prefill_node.planner import PrefillPlanner
from tests.e2e.chaos_audit import Audit, Journal, audit_path, blocks, watch_prefill
from tests.prefill_node.fetching import FIRST, PREFIX
from tests.prefill_node.test_draft_layer import PAGE_SIZE, DraftFetching, drafting, kv_of, model

__all__ = ["model"]


@pytest.fixture
def node(model: SparseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DraftFetching]:
    for owner, method in ((PrefillPlanner, "_advance"), (ChunkedPrefill, "mark_cached"), (ChunkedPrefill, "complete")):
        monkeypatch.setattr(owner, method, getattr(owner, method))  # what `watch_prefill` replaces comes back
    journal = Journal(audit_path(tmp_path))
    watch_prefill(journal)
    lent = kv_of(model, FIRST)
    of_decode_node = blocks(
        (lent[: model.spec.draft_layer + 1], lent[model.spec.draft_layer + 1 :]), range(200), FIRST, 0
    )
    journal.append({"stage": "begun", "attempt": ["lender", 1], "num_tokens": 199, "has": {}, "blocks": of_decode_node})
    node = DraftFetching(lent, **drafting(model, 1))
    yield node
    node.close()


def abort_and_ask_again(node: DraftFetching, spoilt: bool) -> None:
    """The second attempt sends blocks that an aborted one has computed under the same salt."""
    aborted = node.ask(FIRST, salt="own")
    node.until_computed(aborted, 160)
    node.stop(aborted)
    node.until(Quiesced, aborted)
    if spoilt:
        cached = node.prefixes.hold(np.array(FIRST), "own")
        node.pool.kv[0][int(cached.slots()[5]) * PAGE_SIZE + 3][0] ^= 1
        node.pool.slots.release(cached.extents)
        node.prefixes.let_go(cached)
    again = node.ask(FIRST, salt="own")
    assert node.done(again).cached_tokens >= PREFIX
    node.release(again)


def test_blocks_of_an_aborted_attempt_are_known(node: DraftFetching, tmp_path: Path) -> None:
    """Also if the node has read the same tokens from a decode node before."""
    fetched = node.ask_and_grant()
    node.until(FetchDone, fetched)
    node.done(fetched)
    node.release(fetched)
    abort_and_ask_again(node, spoilt=False)
    audit = Audit.of(tmp_path)
    assert audit.wrong == []
    assert audit.seen["fetched"] == 1 < audit.seen["sent"]


def test_a_cached_block_with_a_spoilt_bit_is_found(node: DraftFetching, tmp_path: Path) -> None:
    abort_and_ask_again(node, spoilt=True)
    assert Audit.of(tmp_path).wrong
