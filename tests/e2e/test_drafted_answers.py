"""Whatever a client asks, the answer with drafts is the answer without: the trained model's drafts are often right."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.passkey import CHECKPOINT
from benchmarks.passkey.text import passage_ids
from tests.e2e.cluster import Cluster
from tests.e2e.spawn import fork

SMALL = '{"device_buffer_size": 96, "host_pool_gib": 0.3, "resident_rows": false}'
ASKED: dict[str, dict[str, Any]] = {
    "greedy, with log probabilities": {"temperature": 0, "logprobs": 3},
    "sampled": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "several choices": {"temperature": 1.0, "n": 3, "seed": 2, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "seed": 3, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "greedy penalties": {"temperature": 0, "presence_penalty": 0.6, "logit_bias": {"101": -3}},
    "bad words": {"temperature": 0, "bad_words": ["the", "in"]},
    "stop strings": {"temperature": 0.6, "seed": 4, "stop": ["th", "a b"]},
    "stop tokens": {"temperature": 0.6, "seed": 5, "stop_token_ids": [116, 44], "min_tokens": 12},
    "a regular expression": {"temperature": 0.8, "seed": 6, "structured_outputs": {"regex": "([a-z]+ ){3,9}[a-z]+\\."}},
    "a JSON schema": {
        "temperature": 0,
        "structured_outputs": {"json": {"type": "object", "properties": {"name": {"enum": ["river", "stone"]}}}},
    },
    "one token": {"temperature": 0, "max_tokens": 1},
    "two tokens": {"temperature": 0, "max_tokens": 2},
}


def answers(directory: Path, drafts: int) -> tuple[dict[str, Any], float]:
    """What a service says, all asked at once, and how many drafts it has accepted."""
    directory.mkdir()
    with Cluster(CHECKPOINT, directory, spawn=fork) as cluster:
        flags = {"dtype": "float32", "speculative_num_steps": str(drafts)}
        cluster.gateway(served_model_name="passkey")
        cluster.prefill(**flags)
        decode = cluster.decode(**flags, hisparse_config=SMALL, debug_verify_swap_in=True, max_running_requests=8)
        cluster.wait_ready()
        rng = random.Random(1)
        bodies = [
            {
                "model": "passkey",
                "prompt": passage_ids(rng, 200 + 60 * number),
                "max_tokens": 32,
                "return_draft_counts": True,
                **fields,
            }
            for number, fields in enumerate(ASKED.values())
        ]

        def ask(body: dict[str, Any]) -> Any:
            return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120).raise_for_status().json()

        with ThreadPoolExecutor(len(bodies)) as clients:
            found = dict(zip(ASKED, clients.map(ask, bodies), strict=True))
        return found, decode.metric("spec_decode_num_accepted_tokens_total")


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    directory = tmp_path_factory.mktemp("drafted")
    without, none = answers(directory / "without", 0)
    drafted, accepted = answers(directory / "drafted", 3)
    assert none == 0
    assert accepted > 100
    assert {counts(answer) for answer in without.values()} == {(0, 0)}
    # A node goes on for a moment after a stop string, which only the gateway knows.
    told = sum(counts(answer)[0] for answer in drafted.values())
    assert told <= accepted <= told + 32
    return without, drafted


def counts(answer: dict[str, Any]) -> tuple[int, int]:
    """Takes the drafts that were right and wrong out of an answer's usage."""
    details = answer["usage"].pop("completion_tokens_details")
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_an_answer_with_drafts_is_that_without(name: str, both: tuple[dict[str, Any], dict[str, Any]]) -> None:
    expected, found = (one[name] for one in both)
    assert found["usage"] == expected["usage"]
    for ours, other in zip(found["choices"], expected["choices"], strict=True):
        assert (ours["text"], ours["finish_reason"]) == (other["text"], other["finish_reason"])
        if (logprobs := other["logprobs"]) is not None:
            assert ours["logprobs"]["tokens"] == logprobs["tokens"]
            assert ours["logprobs"]["token_logprobs"] == pytest.approx(logprobs["token_logprobs"], abs=1e-3)
