"""Clients come and go at random: who stays gets exact tokens, and nothing leaks."""

import json
import random

import pytest

from tests.e2e.asking import Job, complete
from tests.e2e.cluster import Node, wait_until
from tests.e2e.conftest import References, StartPair

REQUESTS = 120
CONCURRENCY = 32
LENGTHS = (1, 5, 30, 64, 100, 127, 128, 129, 150, 200, 260, 333, 400, 512)


def pools(node: Node) -> dict[str, float]:
    return {
        "host free": node.metric("host_slots", state="free") + node.metric("host_slots", state="cached"),
        "host quarantined": node.metric("host_slots", state="quarantined"),
        "device free": node.metric("device_slots", state="free"),
    }


@pytest.mark.slow
def test_aborts_among_exact_answers(start_pair: StartPair, references: References, disable_cuda_graph: bool) -> None:
    """Corruption under concurrent transfers (vllm 44238, sglang 23020) and late writes (sglang PRs 24580, 31357)."""
    config = json.dumps({"device_buffer_size": 128, "host_pool_gib": 0.015})
    cluster, prefill, decode = start_pair(
        {"chunked_prefill_size": 128, "context_length": 4096, "max_total_tokens": 4096},
        hisparse_config=config,
        max_running_requests=16,
        max_device_slots=10 * 160,
        debug_verify_swap_in=True,
        disable_cuda_graph=disable_cuda_graph,
    )
    before = pools(decode)

    rng = random.Random(11)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in LENGTHS]
    jobs = []
    for number in range(REQUESTS):
        max_tokens = rng.choice((4, 12, 40))
        abort_after = rng.randrange(max_tokens) if number % 3 == 0 else None
        jobs.append(Job(rng.choice(prompts), max_tokens, abort_after))
    answers = complete(cluster.url, jobs, CONCURRENCY)

    longest = {
        tuple(job.prompt_ids): answer
        for job, answer in sorted(zip(jobs, answers, strict=True), key=lambda pair: len(pair[1]))
    }
    for prompt, answer in longest.items():
        assert answer == references["deepseek_v32"].likeliest(prompt, answer), f"prompt of {len(prompt)} tokens"
    for job, answer in zip(jobs, answers, strict=True):
        assert answer == longest[tuple(job.prompt_ids)][: len(answer)]
        assert len(answer) == job.max_tokens or job.abort_after is not None
    wait_until(lambda: pools(decode) == before, what="every pool to be as full as before")
    prefill.wait_unused("prefill_pages")
    assert decode.metric("requests_finished_total", reason="abort") > 0
    assert decode.metric("filled_bytes_total") > 0, "rows became resident"
