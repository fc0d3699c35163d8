"""What a decode node has, no prefill node computes again, and the tokens are those of transformers all the same."""

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from base.block_hashes import BLOCK_TOKENS
from tests.e2e.asking import Job, ask, complete, ids_of, random_prompts, whole_blocks
from tests.e2e.chaos_audit import Audit
from tests.e2e.cluster import Node
from tests.e2e.conftest import FAMILIES, TOKEN_BYTES, References, StartCluster
from tests.e2e.test_transfer_faults import SHORT, Surroundings

TURNS = 10
LENGTH = 150
"""Tokens of the first turn. Each further one adds the answer and two more."""
NEW_TOKENS = 40


class Rises:
    """By how much metrics of a node have gone up since the last look."""

    def __init__(self, node: Node, side: str) -> None:
        self.node = node
        self._side = side
        self._last: dict[str, float] = {}

    def of(self, name: str) -> float:
        labels = {"side": self._side} if name.startswith("prefix_cache") else {}
        before, self._last[name] = self._last.get(name, 0.0), self.node.metric(name, **labels)
        return self._last[name] - before


@pytest.mark.parametrize("transport", ["tcp", pytest.param("shm", marks=pytest.mark.slow)])
def test_turns_send_only_what_no_node_has(start_cluster: StartCluster, references: References, transport: str) -> None:
    """On two nodes of each kind, of which a prefill node ends half way: turn by turn, and to the token."""
    family = FAMILIES[0]
    cluster = start_cluster(family, routing="least-loaded")
    common = {"context_length": 1024, "transfer_protocol": transport}
    flags = {**common, "transfer_checksum": "full", "chunked_prefill_size": 100, "fetch_prefixes": "always"}
    prefills = [Rises(cluster.prefill(name, **flags), "prefill") for name in ("prefill-1", "prefill-2")]
    decodes = [Rises(cluster.decode(name, **common), "decode") for name in ("decode-1", "decode-2")]
    cluster.wait_ready()
    has = dict.fromkeys((*prefills, *decodes), 0)
    all_fetched = 0
    [text] = random_prompts([LENGTH], seed=5)
    for turn in range(TURNS):
        answer = ask(cluster.url, text, NEW_TOKENS)
        new = ids_of(answer)
        assert new == references[family].likeliest(text, new)
        tokens = len(text) - 1
        [prefill] = [node for node in prefills if node.of("prefix_cache_queries_total")]
        [decode] = [node for node in decodes if node.of("prefix_cache_queries_total")]
        start, cached = min(has[decode], whole_blocks(tokens)), has[prefill]
        fetched = max(0, start - cached)
        assert prefill.of("transfer_bytes_total") == (tokens - start) * TOKEN_BYTES
        assert prefill.of("prefix_fetched_tokens_total") == fetched
        assert prefill.of("prefix_fetched_bytes_total") == fetched * TOKEN_BYTES
        assert prefill.of("prompt_tokens_total") == tokens - max(start, cached)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == max(start, cached)
        has[decode], has[prefill] = whole_blocks(tokens + NEW_TOKENS), whole_blocks(tokens)
        all_fetched += fetched
        text = [*text, *new, turn, turn + 1]
        if turn == TURNS // 2:
            prefill.node.signal(signal.SIGTERM)
            prefill.node.process.wait()
            prefills.remove(prefill)
            del cluster.nodes[prefill.node.name]
    assert all_fetched > BLOCK_TOKENS
    for decode in decodes:
        decode.node.wait_unused("host_slots")


def test_a_spoilt_prefix_is_computed(checkpoints: dict[str, Path], references: References, tmp_path: Path) -> None:
    """The answer's blocks are at the decode node only."""
    surroundings = Surroundings(checkpoints[FAMILIES[0]], tmp_path, references[FAMILIES[0]])
    cluster = surroundings.cluster
    with cluster:
        surroundings.start("tcp", fetch_prefixes="always")
        [prefill] = surroundings.prefill
        [answer] = complete(cluster.url, [Job(SHORT, 100)])
        text, computed = [*SHORT, *answer, 1, 2], prefill.metric("prompt_tokens_total")
        surroundings.switches.spoil_read(prefill.name).touch()
        [new] = complete(cluster.url, [Job(text, 8)])
        assert new == references[FAMILIES[0]].likeliest(text, new)
        assert prefill.metric("prompt_tokens_total") - computed == len(text) - 1 - whole_blocks(len(SHORT) - 1)
        assert prefill.metric("prefix_fetch_failures_total", reason="checksum") == 1
        assert prefill.metric("prefix_fetched_tokens_total") == 0
        surroundings.assert_nothing_is_left()


@pytest.mark.slow
def test_prefixes_come_back_though_messages_are_lost_and_readers_die(
    checkpoints: dict[str, Path], references: References, tmp_path: Path
) -> None:
    """A conversation whose prefill node is killed in every turn but the last, while it may be reading."""
    surroundings = Surroundings(checkpoints[FAMILIES[0]], tmp_path, references[FAMILIES[0]])
    surroundings.faults = replace(surroundings.faults, drop=0.08, delay=0.15, slow=0.3, slow_s=(0.0, 1.0))
    cluster, rng = surroundings.cluster, random.Random(3)
    with cluster, ThreadPoolExecutor() as asking:
        surroundings.start("tcp", prefill_nodes=2, fetch_prefixes="always")
        surroundings.switches.chaos.touch()
        text = list(SHORT)
        for turn in range(5):
            answering = asking.submit(complete, cluster.url, [Job(text, 66)])
            if turn < 4:
                time.sleep(rng.uniform(0.1, 1.0))
                victim = surroundings.prefill[turn % 2]
                victim.kill()
                cluster.restart(victim)
            [new] = answering.result()
            assert new == references[FAMILIES[0]].likeliest(text, new)
            text += [*new, turn]
        surroundings.switches.chaos.unlink()
        surroundings.assert_nothing_is_left()
    assert Audit.of(surroundings.directory).seen["fetched"] > 0
