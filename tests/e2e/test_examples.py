"""The programs in examples/, as users run them, against the small trained model."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.passkey import CHECKPOINT
from tests.e2e.cluster import Cluster
from tests.e2e.spawn import fork
from tests.test_house import ROOT

EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(CHECKPOINT, tmp_path_factory.mktemp("examples"), spawn=fork) as cluster:
        cluster.gateway(served_model_name="passkey", tool_call_parser="hermes")
        cluster.prefill()
        cluster.decode()
        yield cluster.wait_ready()


def printed(cluster: Cluster, program: str, *words: str) -> str:
    addresses = {"OPENAI_BASE_URL": f"{cluster.url}/v1", "ANTHROPIC_BASE_URL": cluster.url}
    keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    command = [sys.executable, str(EXAMPLES / program), *words]
    environment = {**os.environ, **addresses, **keys}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_openai_sdk_streams_an_answer(cluster: Cluster) -> None:
    assert "The pass key of river is 40917" in printed(cluster, "openai_sdk.py")


def test_the_anthropic_sdk_streams_an_answer(cluster: Cluster) -> None:
    assert "The pass key of castle is 11304" in printed(cluster, "anthropic_sdk.py")


def test_an_agent_calls_its_tool_and_answers(cluster: Cluster) -> None:
    called, answer = printed(cluster, "agent.py").split("\n", 1)
    assert re.fullmatch(r"look_up\(\{'place': '(river|castle)'\}\) -> (40917|11304)", called)
    assert answer.startswith("answer: ")


def test_a_document_is_computed_once_for_many_questions(cluster: Cluster, tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text("The pass key of river is 40917. The pass key of castle is 11304.\n" + "Nothing else. " * 60)
    questions = [f"What is the pass key of {place}?" for place in ("river", "castle")]
    first, second = printed(cluster, "document.py", str(document), *questions).splitlines()
    assert "40917" in first
    assert "11304" in second
    cached = [int(re.findall(r"(\d+) of", line)[0]) for line in (first, second)]
    assert cached[0] < 100 < 800 < cached[1]


def test_a_load_test_says_what_it_measured(cluster: Cluster) -> None:
    assert printed(cluster, "load_test.py", "8", "4").startswith("8 requests in ")


def test_every_example_is_in_the_table() -> None:
    assert set(re.findall(r"`python examples/(\w+\.py)", (EXAMPLES / "README.md").read_text())) == {
        path.name for path in EXAMPLES.glob("*.py")
    }
