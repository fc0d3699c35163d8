"""Requests go where their prefix is cached, as far as nodes have told the gateway."""

import numpy as np
import pytest

from base.block_hashes import BlockHashes, StoredBlocks, block_hashes
from control.membership import CacheReports
from tests.gateway.nodes import FakeNode, wait_until
from tests.gateway.world import World

PROMPT = [5] * 200
"""Three blocks and a rest."""


def hashes(blocks: int = 3) -> BlockHashes:
    return block_hashes(np.array(PROMPT[: 64 * blocks]))


def report(node: FakeNode, gained: BlockHashes) -> CacheReports:
    """Tell the gateway what the node has cached, by the real code."""
    reports = CacheReports(node.membership, lambda limit: gained[:limit])
    reports.stored(StoredBlocks(gained, np.array(PROMPT), None, ""))
    wait_until(lambda: node.membership.cache_serials())
    reports.send(1.0)
    wait_until(lambda: node.membership.cache_serials() == {node.gateway_address: 1})
    return reports


def ask(world: World, prompt: list[int] = PROMPT) -> None:
    answer = world.post(prompt=prompt, max_tokens=1)
    assert answer.status_code == 200, answer.text


def test_a_request_goes_to_the_node_that_has_most_of_its_prefix(fresh: World) -> None:
    nodes = [fresh.decode, fresh.start_decode(queued_tokens=50), fresh.start_decode(queued_tokens=60)]
    report(nodes[1], hashes(2))
    report(nodes[2], hashes(3))
    nodes[2].reject = "queue_full"
    ask(fresh)
    assert [len(node.generated) for node in nodes] == [0, 1, 1], "the best one refused, the next best one took it"
    ask(fresh, [6, *PROMPT])
    assert [len(node.generated) for node in nodes] == [1, 1, 1], "another prefix: the emptiest"


def test_prefill_nodes_are_ranked_by_what_they_have(fresh: World) -> None:
    prefill, fuller = fresh.prefill, fresh.start_prefill(queued_tokens=50)
    report(fuller, hashes())
    ask(fresh)
    ask(fresh, [6, *PROMPT])
    assert [request.prefill_nodes for request in fresh.decode.generated] == [
        (fuller.me, prefill.me),
        (prefill.me, fuller.me),
    ]


@pytest.mark.parametrize("fresh", [{"routing": "least-loaded"}], indirect=True)
def test_least_loaded_routing_wants_no_updates(fresh: World) -> None:
    nodes = [fresh.decode, fresh.start_decode(queued_tokens=1)]
    reports = CacheReports(nodes[1].membership, lambda limit: hashes()[:limit])
    reports.stored(StoredBlocks(hashes(), np.array(PROMPT), None, ""))
    reports.send(1.0)
    ask(fresh)
    assert nodes[1].membership.cache_serials() == {}
    assert [len(node.generated) for node in nodes] == [1, 0]


def test_a_node_that_restarted_has_nothing(fresh: World) -> None:
    nodes = [fresh.decode, fresh.start_decode(queued_tokens=100)]
    report(nodes[1], hashes())
    port = nodes[1].port
    nodes[1].die()
    again = fresh.start_decode(queued_tokens=100, port=port)
    wait_until(lambda: again.membership.cache_serials() == {fresh.gateway.control_address: 0})
    ask(fresh)
    assert [len(node.generated) for node in (nodes[0], again)] == [1, 0]


def test_choices_of_one_prompt_are_generated_at_one_node(fresh: World) -> None:
    nodes = [fresh.decode, fresh.start_decode()]
    assert len(fresh.post(prompt=[PROMPT, [6, *PROMPT]], max_tokens=1, n=4).json()["choices"]) == 8
    groups = [{(request.group, request.prompt_ids) for request in node.generated} for node in nodes]
    assert sorted(map(len, groups)) == [1, 1], "the second prompt goes to the other node, which is emptier"
    assert all(len(node.generated) == 4 for node in nodes)
