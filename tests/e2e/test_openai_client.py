"""The official client against the whole service."""

import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.e2e.cluster import Cluster, wait_until
from tests.e2e.spawn import fork


@pytest.fixture(scope="module")
def cluster(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(checkpoints["glm_moe_dsa"], tmp_path_factory.mktemp("openai"), spawn=fork) as cluster:
        cluster.gateway(served_model_name="tiny")
        cluster.prefill()
        cluster.decode()
        yield cluster.wait_ready()


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


GREEDY = {"ignore_eos": True, "return_token_ids": True}


def test_a_client_that_leaves_gives_its_slots_back(client: openai.OpenAI, cluster: Cluster) -> None:
    decode = cluster.nodes["decode"]
    stream = client.completions.create(
        model="tiny", prompt=[3] * 500, max_tokens=7000, temperature=0, stream=True, extra_body=GREEDY
    )
    next(iter(stream))
    assert decode.metric("host_slots", state="used") > 0
    stream.close()
    decode.wait_unused("host_slots")
    assert decode.metric("device_slots", state="used") == 0
    assert decode.metric("requests_finished_total", reason="abort") >= 1
    cluster.nodes["prefill"].wait_unused("prefill_pages")


def test_a_request_costs_two_lines_and_each_line_of_it_names_it(client: openai.OpenAI, cluster: Cluster) -> None:
    completion = client.completions.create(model="tiny", prompt="abc", max_tokens=2)
    for node in cluster.nodes.values():
        wait_until(lambda node=node: f"request_id={completion.id}" in node.log, what=node.name)

    def lines() -> list[str]:
        logs = (node.log.splitlines() for node in cluster.nodes.values())
        return [line for log in logs for line in log if completion.id in line and "level=debug" not in line]

    wait_until(lambda: len(lines()) >= 2, what="a line of the gateway and one of the decode node")
    finished, answered = sorted(lines(), key=lambda line: "event=answered" in line)
    assert "event=finished" in finished
    assert f" prefill={cluster.nodes['prefill'].control_address} " in finished
    assert f" nodes={cluster.nodes['decode'].control_address} " in answered


def test_each_stage_before_the_first_token_is_measured_once(client: openai.OpenAI, cluster: Cluster) -> None:
    stages = {
        "decode": ("queue", "admission", "first_step"),
        "prefill": ("prefill_queue", "prefill", "transfer"),
    }

    def counts(part: str) -> list[float]:
        return [
            cluster.nodes[name].metric(f"stage_seconds_{part}", stage=stage, prompt="to 1K")
            for name, stages_there in stages.items()
            for stage in stages_there
        ]

    before, seconds_before, began = counts("count"), counts("sum"), time.monotonic()
    client.completions.create(model="tiny", prompt=[5] * 300, max_tokens=2)
    took = time.monotonic() - began
    assert counts("count") == [count + 1 for count in before]
    spent = [after - earlier for after, earlier in zip(counts("sum"), seconds_before, strict=True)]
    assert min(spent) >= 0
    assert 0 < sum(spent) < took
