"""What a hostile client sends to a running service costs that client: others have their tokens, and no process ends."""

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.asking import ask, ids_of, random_prompts
from tests.e2e.cluster import HOT_BUFFER, Cluster
from tests.e2e.conftest import Reference, References, StartCluster
from tests.gateway.test_hostile_schemas import RECURSIVE, TOO_LONG

PROMPT = random_prompts((40,), seed=35)[0]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
TOKENS: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "ignore_eos": True}
HOSTILE: dict[str, tuple[str, dict[str, Any]]] = {
    "a schema of references to itself": ("chat/completions", {**CHAT, "tools": [RECURSIVE], "tool_choice": "auto"}),
    "a grammar without end": ("chat/completions", {**CHAT, "tools": [TOO_LONG], "tool_choice": "required"}),
    "a penalty that overflows": ("completions", {**TOKENS, "repetition_penalty": 1e-45, "max_tokens": 8}),
    "a bias beyond its bounds": ("completions", {**TOKENS, "logit_bias": {"5": 1e30}, "max_tokens": 8}),
    "answers larger than may be held": ("completions", {**TOKENS, "logprobs": 20, "n": 8, "max_tokens": 400}),
}


@pytest.fixture
def service(start_cluster: StartCluster) -> Iterator[Cluster]:
    cluster = start_cluster(max_answer_mib=1)
    cluster.prefill()
    cluster.decode(hisparse_config=HOT_BUFFER)
    cluster.wait_ready()
    yield cluster
    for node in cluster.nodes.values():
        node.check_alive()


def test_honest_clients_have_their_tokens_beside_hostile_ones(service: Cluster, references: References) -> None:
    reference: Reference = references["deepseek_v32"]
    statuses: dict[str, int] = {}

    def attack(name: str, path: str, body: dict[str, Any]) -> None:
        statuses[name] = httpx.post(f"{service.url}/v1/{path}", json=body, timeout=120).status_code

    attackers = [threading.Thread(target=attack, args=(name, *one)) for name, one in HOSTILE.items()]
    for attacker in attackers:
        attacker.start()
    for prompt in random_prompts((30, 90, 200), seed=36):
        answer = ids_of(ask(service.url, prompt, 20))
        assert answer == reference.likeliest(prompt, answer)
    for attacker in attackers:
        attacker.join()
    assert statuses.pop("a schema of references to itself") in (200, 400)
    assert statuses == dict.fromkeys(statuses, 400)
    answer = ids_of(ask(service.url, PROMPT, 20))
    assert answer == reference.likeliest(PROMPT, answer)
