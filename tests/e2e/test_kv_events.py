"""What other controllers read of a service: what prefix caches have, over ZeroMQ, and how full they are."""

import json

import numpy as np

from base.block_hashes import BLOCK_TOKENS, block_hashes
from cli.serve import free_port
from tests.e2e.asking import ask, ids_of, streamed, whole_blocks
from tests.e2e.cluster import wait_until
from tests.e2e.conftest import StartPair
from tests.service.test_kv_events import Subscriber


def test_subscribers_know_what_nodes_have_cached(start_pair: StartPair) -> None:
    ends = [[f"tcp://127.0.0.1:{free_port()}" for _ in range(2)] for _ in range(2)]
    flags = [
        {"kv_events_config": json.dumps({"enable_kv_cache_events": True, "endpoint": one, "replay_endpoint": other})}
        for one, other in ends
    ]
    cluster, prefill, decode = start_pair(flags[0], **flags[1])
    prompt = [5, 6, 7] * 60
    answer = ids_of(ask(cluster.url, prompt, 100, cache_salt="alice"))
    answer_2 = ids_of(ask(cluster.url, prompt, 100))
    assert answer_2 == answer
    of_prefill, of_decode = (Subscriber(*each) for each in ends)
    whole = np.array([*prompt, *answer][: whole_blocks(len(prompt) + len(answer) - 1)])
    names = block_hashes(whole).tolist()
    computed = whole_blocks(len(prompt) - 1) // BLOCK_TOKENS
    for subscriber, blocks in ((of_prefill, computed), (of_decode, len(names))):
        wait_until(lambda s=subscriber, n=blocks: (s.catch_up(), len(s.table) == 2 * n)[1], what="all blocks")
        unsalted = [name for name in subscriber.table if name in names]
        assert unsalted == names[:blocks]
        assert [token for name in unsalted for token in subscriber.table[name][1]] == whole[: blocks * 64].tolist()
        assert len({salt for _, _, salt in subscriber.table.values()}) == 2, "the digest of alice's, and none"
        subscriber.close()
    gateway = cluster.nodes["gateway"]
    decode.wait_unused("host_slots")
    assert [node.metric("kv_usage") for node in (prefill, decode)] == [0, 0], "nobody holds what is cached"
    with streamed(cluster.url, [1] * 50, 8000) as lines:
        next(lines)
        wait_until(lambda: gateway.metric("kv_usage") > 0)
        assert 0 < decode.metric("kv_usage") < 1
