"""Requests go where their prefix is cached, as far as nodes have told the gateway."""

from collections.abc import Callable

import httpx
import numpy as np
import pytest

from base.block_hashes import BlockHashes, block_hashes
from control.membership import CacheReports
from tests.gateway.world import MODEL, FakeDecodeNode, FakeNode, RunningGateway, wait_until

StartDecode = Callable[..., FakeDecodeNode]

PROMPT = [5] * 200
"""Three blocks and a rest."""


def hashes(blocks: int = 3) -> BlockHashes:
    return block_hashes(np.array(PROMPT[: 64 * blocks]))


def report(node: FakeNode, gained: BlockHashes) -> CacheReports:
    """Tell the gateway what the node has cached, by the real code."""
    reports = CacheReports(node.membership, lambda limit: gained[:limit])
    reports.stored(gained)
    wait_until(lambda: node.membership.cache_serials())
    reports.send(1.0)
    wait_until(lambda: node.membership.cache_serials() == {node.gateway_address: 1})
    return reports


def ask(http: httpx.Client, prompt: list[int] = PROMPT) -> None:
    answer = http.post("/v1/completions", json={"model": MODEL, "prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


def test_a_request_goes_to_the_node_that_has_most_of_its_prefix(
    prefill: FakeNode, start_decode: StartDecode, http: httpx.Client
) -> None:
    nodes = [start_decode(), start_decode(queued_tokens=50), start_decode(queued_tokens=60)]
    report(nodes[1], hashes(2))
    report(nodes[2], hashes(3))
    nodes[2].reject = "queue_full"
    ask(http)
    assert [len(node.generated) for node in nodes] == [0, 1, 1], "the best one refused, the next best one took it"
    ask(http, [6, *PROMPT])
    assert [len(node.generated) for node in nodes] == [1, 1, 1], "another prefix: the emptiest"


def test_prefill_nodes_are_ranked_by_what_they_have(
    gateway: RunningGateway, prefill: FakeNode, start_decode: StartDecode, http: httpx.Client
) -> None:
    decode = start_decode()
    fuller = FakeNode(gateway.control_address, "prefill", queued_tokens=50).start()
    report(fuller, hashes())
    ask(http)
    ask(http, [6, *PROMPT])
    assert [request.prefill_nodes for request in decode.generated] == [(fuller.me, prefill.me), (prefill.me, fuller.me)]
    fuller.die()


@pytest.mark.parametrize("gateway", [{"routing": "least-loaded"}], indirect=True)
def test_least_loaded_routing_wants_no_updates(
    prefill: FakeNode, start_decode: StartDecode, http: httpx.Client
) -> None:
    nodes = [start_decode(), start_decode(queued_tokens=1)]
    reports = CacheReports(nodes[1].membership, lambda limit: hashes()[:limit])
    reports.stored(hashes())
    reports.send(1.0)
    ask(http)
    assert nodes[1].membership.cache_serials() == {}
    assert [len(node.generated) for node in nodes] == [1, 0]


def test_a_node_that_restarted_has_nothing(
    gateway: RunningGateway, prefill: FakeNode, start_decode: StartDecode, http: httpx.Client
) -> None:
    nodes = [start_decode(), start_decode(queued_tokens=100)]
    report(nodes[1], hashes())
    port = nodes[1].port
    nodes[1].die()
    again = start_decode(queued_tokens=100, port=port)
    wait_until(lambda: again.membership.cache_serials() == {gateway.control_address: 0})
    ask(http)
    assert [len(node.generated) for node in (nodes[0], again)] == [1, 0]


def test_choices_of_one_prompt_are_generated_at_one_node(
    prefill: FakeNode, start_decode: StartDecode, http: httpx.Client
) -> None:
    nodes = [start_decode(), start_decode()]
    body = {"model": MODEL, "prompt": [PROMPT, [6, *PROMPT]], "max_tokens": 1, "n": 4}
    assert len(http.post("/v1/completions", json=body).json()["choices"]) == 8
    groups = [{(request.group, request.prompt_ids) for request in node.generated} for node in nodes]
    assert sorted(map(len, groups)) == [1, 1], "the second prompt goes to the other node, which is emptier"
    assert all(len(node.generated) == 4 for node in nodes)


def test_a_choice_goes_elsewhere_if_the_node_of_the_others_is_full(
    prefill: FakeNode, start_decode: StartDecode, http: httpx.Client
) -> None:
    nodes = [start_decode(), start_decode(queued_tokens=10**6)]
    nodes[0].reject = "queue_full"
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "n": 3}
    assert http.post("/v1/completions", json=body).status_code == 200
    assert [len(node.generated) for node in nodes] == [3, 3]
