"""Single ranks of nodes are killed and stopped at random: no token is wrong, and nothing is left."""

import random
import signal
import time

import pytest

from tests.e2e.chaos_clients import SECONDS, SEED, Clients, assert_as_before, prompts_with_answers
from tests.e2e.cluster import HOT_BUFFER, Cluster, Node, wait_until
from tests.e2e.conftest import References, StartCluster
from tests.e2e.test_ranks import ranks_of

RANKS = 2
STEP_TIMEOUT_S = 3.0
LENGTHS = (1, 7, 40, 129, 200, 512, 1000)
DECK = ("stop", "kill", "terminate", "stop for a moment", "kill", "stop for a moment")


def registered(cluster: Cluster) -> bool:
    gateway = cluster.nodes["gateway"]
    return gateway.metric("nodes", role="decode") == RANKS + 1 and gateway.metric("nodes", role="prefill") == 2


def disturb(group: Node, kind: str, rng: random.Random) -> str:
    """Do that to a rank. What, in words."""
    rank = rng.randrange(RANKS)
    process = ranks_of(group)[rank]
    if kind == "stop for a moment":
        process.suspend()
        time.sleep(rng.uniform(0.2, 0.4 * STEP_TIMEOUT_S))
        process.resume()
    else:
        {"kill": process.kill, "stop": process.suspend, "terminate": process.terminate}[kind]()
    return f"{group.name}: {kind}: rank {rank}"


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 1000)
def test_no_token_is_wrong_or_slot_left_when_ranks_end(start_cluster: StartCluster, references: References) -> None:
    rng, prompts = random.Random(SEED), prompts_with_answers(references["deepseek_v32"], LENGTHS, SEED)
    cluster = start_cluster()
    prefills = [
        cluster.prefill("prefill", transfer_checksum="full"),
        cluster.prefill(
            "prefill-group", ranks=RANKS, step_timeout=STEP_TIMEOUT_S, transfer_checksum="full", chunked_prefill_size=50
        ),
    ]
    decode_group = cluster.decode(
        "decode-group", ranks=RANKS, hisparse_config=HOT_BUFFER, step_timeout=STEP_TIMEOUT_S, debug_verify_swap_in=True
    )
    other = cluster.decode("other", hisparse_config=HOT_BUFFER)
    cluster.wait_ready(prefill=2, decode=RANKS + 1)
    clients = Clients(cluster.url, prompts, rng, concurrency=8, patience=60)
    notes: list[str] = []
    deck: list[str] = []
    with clients.asking(notes):
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            time.sleep(rng.uniform(0.5, 3))
            deck = deck or rng.sample(DECK, len(DECK))
            group = rng.choice((decode_group, prefills[1]))
            kind = deck.pop()
            notes.append(disturb(group, kind, rng))
            if kind == "stop for a moment":
                group.check_alive()
                continue
            code = group.process.wait(timeout=60)
            assert code == (0 if kind == "terminate" else 1), notes[-1]
            notes[-1] += f": {group.log.splitlines()[-1][:100]}" if code else ""
            cluster.restart(group)
            # A gateway counts the old processes for 3 s.
            wait_until(group.is_up, 120, "the group to be up")
            wait_until(lambda: registered(cluster), 120, "the group to be back")
    assert clients.exact >= SECONDS / 4
    assert_as_before(cluster.url, prompts)

    def left() -> dict[str, float]:
        held = {f"{node.name} pages": node.metric("prefill_pages", state="used") for node in prefills}
        for node, rank in ((other, 0), *((decode_group, rank) for rank in range(RANKS))):
            for state in ("used", "quarantined"):
                held[f"{node.name} {rank} {state}"] = node.metric("host_slots", rank, state=state)
        return {what: count for what, count in held.items() if count}

    wait_until(lambda: left() == {}, 90, "everything to come back")
    for group in (decode_group, prefills[1]):
        group.signal(signal.SIGTERM)
        assert group.process.wait(timeout=60) == 0
