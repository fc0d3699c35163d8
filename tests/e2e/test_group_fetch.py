"""Prefill nodes of several ranks read prefixes back from a decode node, and the tokens are those of transformers."""

import random
import re
import signal

import pytest

from tests.e2e.asking import ask, ids_of, whole_blocks
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import TOKEN_BYTES, Reference, References, StartCluster
from tests.e2e.test_fetch import Rises
from transfer.checksum import GROUP_POSITIONS

NEW_TOKENS = 100
"""More than a block and the least that is fetched."""


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "transport"), [(2, "tcp"), (4, "shm")])
def test_a_group_fetches_generated_and_prompt_tokens_each_rank_a_part(
    start_cluster: StartCluster, references: References, ranks: int, transport: str
) -> None:
    assert_fetched_in_parts(start_cluster(), references["deepseek_v32"], ranks, transfer_protocol=transport)


def assert_fetched_in_parts(cluster: Cluster, reference: Reference, ranks: int, **node_flags: object) -> None:
    """A node of one rank prefills the first turn, a group the next two, and another of one rank says the last again."""
    length = ranks * GROUP_POSITIONS - 200
    common = {"context_length": length + 600, **node_flags}
    flags = {**common, "transfer_checksum": "full", "fetch_prefixes": "always"}

    def replace_prefill(name: str, ranks: int) -> None:
        """The cache of the one before ends with it."""
        if before := cluster.nodes.get("prefill"):
            before.signal(signal.SIGTERM)
            assert before.process.wait(timeout=60) == 0
            del cluster.nodes["prefill"]
        cluster.nodes["prefill"] = cluster.prefill(name, ranks=ranks, chunked_prefill_size=1000, **flags)
        del cluster.nodes[name]
        cluster.wait_ready(decode=1, prefill=1)

    decode = cluster.decode(**common)
    replace_prefill("one", 1)
    rng = random.Random(9)
    text = [rng.randrange(256) for _ in range(length)]
    text += [*ids_of(ask(cluster.url, text, NEW_TOKENS)), 1, 2]
    replace_prefill("group", ranks)
    prefill = Rises(cluster.nodes["prefill"], "prefill")
    cached = 0
    for _ in range(2):
        new = ids_of(ask(cluster.url, text, NEW_TOKENS))
        assert new == reference.likeliest(text, new)
        tokens = len(text) - 1
        # The decode node has no KV of the last token that it has generated, nor of what was added behind it.
        fetched = whole_blocks(tokens - 2) - cached
        assert prefill.of("prefix_fetched_tokens_total") == fetched
        assert prefill.of("prefix_fetched_bytes_total") == fetched * TOKEN_BYTES, "once, by all ranks together"
        assert prefill.of("prompt_tokens_total") == tokens - cached - fetched
        assert prefill.of("transfer_bytes_total") == (tokens - cached - fetched) * TOKEN_BYTES
        cached = whole_blocks(tokens)
        asked, text = text, [*text, *new, 1, 2]
    group = cluster.nodes["prefill"]
    assert group.metric("prefix_fetch_seconds_count") == 2
    readers = re.findall(r"process=prefill-rank-(\d+) event=reads ", group.log)
    assert set(map(int, readers)) == set(range(ranks))
    replace_prefill("again", 1)
    assert ids_of(ask(cluster.url, asked, NEW_TOKENS)) == new
    decode.wait_unused("host_slots")
