"""Conversations of many clients on several decode nodes: they stay where their prefix is, and fill nodes evenly."""

import asyncio
import json
import random
from collections.abc import Sequence

import httpx
import pytest

from base.block_hashes import BLOCK_TOKENS
from tests.e2e.cluster import Node
from tests.e2e.conftest import StartCluster

SESSIONS, TURNS = 60, 4
NEW_TOKENS = 40
STARTS_S = 20.0
"""All sessions begin within that time."""
THINK_S = 1.0
"""Most that a client waits before its next turn; what a node has cached is known within some tenths of it."""


async def converse(http: httpx.AsyncClient, number: int) -> int:
    """Play a session. Returns how many tokens its turns could find cached: whole blocks of the turn before."""
    rng = random.Random(number)
    await asyncio.sleep(rng.uniform(0, STARTS_S))
    text, findable = [rng.randrange(256) for _ in range(rng.randrange(100, 400))], 0
    for turn in range(TURNS):
        body = {"model": "tiny", "prompt": text, "max_tokens": NEW_TOKENS, "ignore_eos": True, "seed": number}
        answer = await http.post("/v1/completions", json=body | {"return_token_ids": True})
        text += answer.json()["choices"][0]["token_ids"]
        if turn + 1 < TURNS:
            findable += (len(text) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        text += [rng.randrange(256) for _ in range(rng.randrange(20, 100))]
        await asyncio.sleep(rng.uniform(0.3, THINK_S))
    return findable


async def watch(nodes: Sequence[Node], loads: list[list[float]]) -> None:
    """Note the KV tokens of each node's requests, again and again."""
    while True:
        await asyncio.sleep(0.2)
        loads.append([await asyncio.to_thread(node.metric, "host_slots", state="used") for node in nodes])


@pytest.mark.slow
def test_sessions_find_what_is_cached_and_fill_nodes_evenly(start_cluster: StartCluster) -> None:
    cluster = start_cluster("deepseek_v32")
    cluster.prefill(context_length=1024)
    tiers = json.dumps({"device_buffer_size": 64, "host_pool_gib": 0.05})
    nodes = [
        cluster.decode(name, context_length=1024, hisparse_config=tiers, max_running_requests=16)
        for name in ("one", "two", "three")
    ]
    cluster.wait_ready()
    loads: list[list[float]] = []

    async def play() -> int:
        watching = asyncio.create_task(watch(nodes, loads))
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=httpx.Limits()) as http:
            findable = sum(await asyncio.gather(*(converse(http, number) for number in range(SESSIONS))))
        watching.cancel()
        return findable

    findable = asyncio.run(play())
    found = sum(node.metric("prefix_cache_hits_total", side="decode") for node in nodes)
    means = [sum(column) / len(loads) for column in zip(*loads, strict=True)]
    print(f"found {found:.0f} of {findable} tokens ({found / findable:.1%}); mean KV tokens of nodes {means}")
    assert found >= 0.95 * findable
    assert max(means) <= 1.5 * sum(means) / len(means)
