"""The service says, token for token, what transformers says."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.asking import Job, random_prompts
from tests.e2e.asking import assert_exact as assert_answers
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import FAMILIES, Reference, References, StartPair
from tests.fp8_reference import Fp8Cache

NEW_TOKENS = 64
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 500, 1500)


ALONE = random_prompts(LENGTHS)
MORE_LENGTHS = (2, 17, 100, 127, 128, 129, 130, 200, 256, 300)
TOGETHER = ALONE + random_prompts(MORE_LENGTHS, seed=1)
TOGETHER_IN_FP8 = ALONE + random_prompts(MORE_LENGTHS, seed=2)
"""Prompts without near-ties, which processors decide differently: the reference gives the same tokens with weights that
are disturbed in their last bits. Of those in TOGETHER, one gets another token."""


def configurations() -> Iterator[Any]:
    """Of a node, for each family; all but one are slow: test_paths.py and test_ranks.py have the other family."""
    nodes = [(1, 100, "tcp", "tcp"), (16, 512, "auto", "shm"), (64, 333, "tcp", "tcp")]
    for number, (node, family) in enumerate(product(nodes, FAMILIES)):
        yield pytest.param(*node, family, marks=pytest.mark.slow if number != 3 else ())


def assert_exact(
    cluster: Cluster, reference: Reference, batch: list[list[int]], concurrency: int, new_tokens: int = NEW_TOKENS
) -> None:
    assert_answers(cluster.url, reference, [Job(prompt, new_tokens) for prompt in batch], concurrency)


def assert_same_logprobs(cluster: Cluster, reference: Reference, batch: list[list[int]]) -> None:
    """Those of the prompts' tokens, of which an echo without an answer has the same."""
    body = {"prompt": batch, "max_tokens": 0, "echo": True, "logprobs": 3, "prompt_logprobs": 5, "n": 2}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    for prompt, choice in zip([prompt for prompt in batch for _ in range(2)], answer.json()["choices"], strict=True):
        expected = reference.logprobs(prompt)
        first, *rest = choice["prompt_logprobs"]
        assert first is None
        assert len(rest) == len(prompt) - 1
        for logprobs, token_id, found in zip(expected, prompt[1:], rest, strict=False):
            assert found[str(token_id)]["logprob"] == pytest.approx(float(logprobs[token_id]), abs=2e-4)
            best = sorted((entry["rank"], entry["logprob"]) for entry in found.values())[:5]
            assert [rank for rank, _ in best] == [1, 2, 3, 4, 5]
            assert [logprob for _, logprob in best] == pytest.approx(logprobs.topk(5).values.tolist(), abs=2e-4)
        echoed = [None, *(found[str(i)]["logprob"] for i, found in zip(prompt[1:], rest, strict=True))]
        assert choice["logprobs"]["token_logprobs"] == echoed


def assert_choices_share_a_prefill(cluster: Cluster, prefill: Any) -> None:
    """Also in a stream that begins with log probabilities of the prompt, and says what the whole answer says."""
    one, other = random_prompts((300, 300), seed=9)

    def ask(prompt: list[int], stream: bool) -> tuple[list[Any], float]:
        before = prefill.metric("transfer_bytes_total")
        body = {"prompt": prompt, "max_tokens": 12, "echo": True, "logprobs": 1, "n": 3, "seed": 5, "stream": stream}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        if stream:
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
            parts = [part for line in lines for part in json.loads(line)["choices"]]
        else:
            parts = answer.json()["choices"]
        said = []
        for index in range(3):
            own = [part for part in parts if part["index"] == index]
            logprobs = [logprob for part in own if part["logprobs"] for logprob in part["logprobs"]["token_logprobs"]]
            said.append(("".join(part["text"] for part in own), logprobs))
        return said, prefill.metric("transfer_bytes_total") - before

    _, of_a_whole_answer = ask(one, stream=False)
    streamed, of_a_stream = ask(other, stream=True)
    whole, _ = ask(other, stream=False)
    assert of_a_stream == of_a_whole_answer > 0
    for (text, logprobs), (expected_text, expected) in zip(streamed, whole, strict=True):
        assert text == expected_text
        assert logprobs[0] is expected[0] is None
        assert logprobs[1:] == pytest.approx(expected[1:], abs=2e-4)


@pytest.mark.parametrize(("page_size", "chunk", "protocol", "transport", "family"), list(configurations()))
def test_greedy_tokens_equal_transformers(
    start_pair: StartPair,
    references: References,
    page_size: int,
    chunk: int,
    protocol: str,
    transport: str,
    family: str,
) -> None:
    flags = {"page_size": page_size, "chunked_prefill_size": chunk, "transfer_checksum": "full"}
    cluster, prefill, decode = start_pair(
        {**flags, "transfer_protocol": protocol}, family, debug_verify_swap_in=True, transfer_protocol="auto"
    )
    assert_exact(cluster, references[family], ALONE, concurrency=1, new_tokens=20)
    assert_exact(cluster, references[family], TOGETHER, concurrency=16)
    assert_same_logprobs(cluster, references[family], random_prompts((1, 2, 500), seed=8))
    assert_choices_share_a_prefill(cluster, prefill)

    cached = prefill.metric("prefix_cache_hits_total", side="prefill")
    # The decode node has some prompts entirely, and asks nobody for them.
    cached += decode.metric("prefix_cache_hits_total", side="decode")
    assert prefill.metric("prompt_tokens_total") + cached >= sum(len(prompt) - 1 for prompt in ALONE + TOGETHER)
    assert prefill.metric("transfer_bytes_total") > 0
    assert f"event=route decode=127.0.0.1:{decode.control_port} transport={transport}" in prefill.log
    assert "event=landed" in decode.log
    assert "checksums=0" not in decode.log
    assert decode.metric("swap_in_misses_total") > 0
    decode.wait_unused("host_slots")


@pytest.mark.parametrize("family", [FAMILIES[0], pytest.param(FAMILIES[1], marks=pytest.mark.slow)])
def test_fp8_kv_gives_tokens_of_a_plain_codec(start_pair: StartPair, checkpoints: dict[str, Path], family: str) -> None:
    """vllm 57019: noise that only a comparison of the system with itself did not see."""
    common = {"kv_cache_dtype": "fp8_e4m3"}
    flags = {**common, "page_size": 16, "chunked_prefill_size": 333, "transfer_checksum": "full"}
    cluster, prefill, _ = start_pair(flags, family, **common, debug_verify_swap_in=True)
    assert_exact(cluster, Reference(checkpoints[family], Fp8Cache), TOGETHER_IN_FP8, concurrency=16)
    tokens = sum(len(prompt) - 1 for prompt in TOGETHER_IN_FP8)
    # The last one of each is the draft layer's.
    layers, index_layers = (5, 5) if family == "deepseek_v32" else (5, 4)
    assert prefill.metric("transfer_bytes_total") == tokens * (layers * (48 + 4 + 32) + index_layers * 36)
