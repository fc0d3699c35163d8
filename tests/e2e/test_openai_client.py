"""The official client against the whole service."""

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


def test_every_log_line_of_a_request_names_it(client: openai.OpenAI, cluster: Cluster) -> None:
    completion = client.completions.create(model="tiny", prompt="abc", max_tokens=2)
    for node in cluster.nodes.values():
        # Its arrival and its end.
        wait_until(lambda node=node: node.log.count(f"request_id={completion.id}") >= 2, what=node.name)
