"""Other projects' clients against a gateway whose decode node says scripted text.

`make test-clients` installs them in environments of their own and runs this file. `make test` does not collect it.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gateway.world import MODEL, WEATHER, World, glm_call, glm_service

CLIENTS = Path(os.environ.get("CLIENTS", ".venv-clients"))
PROGRAMS = Path(__file__).parent / "programs"
OPEN_RESPONSES = CLIENTS / "open-responses"
NOT_OFFERED = ("image-",)
"""How the names of Open Responses' tests begin that may fail."""
REQUESTS = 6
TIMEOUT_S = 400


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("glm")


@pytest.fixture(scope="module")
def service(directory: Path) -> Iterator[World]:
    service = glm_service(directory)
    service.says("Rome, then.</think>I look.\n" + glm_call("Rome"))
    yield service
    service.close()


def run(environment: str, program: str, *arguments: str, **variables: str) -> None:
    """Runs a program of an environment, and fails with its output."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [CLIENTS / environment / "bin" / program, *arguments],
        env={**own, "HF_HUB_DISABLE_TELEMETRY": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", **variables},
        timeout=TIMEOUT_S,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("library", ["litellm", "langchain", "agents", "pydantic_ai"])
def test_a_library_gets_text_reasoning_and_calls(service: World, library: str) -> None:
    run(library, "python", str(PROGRAMS / f"{library}_client.py"), service.gateway.url, json.dumps(WEATHER))


@pytest.mark.parametrize("endpoint", ["chat", "completions", "responses", "messages"])
@pytest.mark.parametrize("streaming", [True, False])
def test_aiperf_runs_without_an_error(
    service: World, directory: Path, tmp_path: Path, endpoint: str, streaming: bool
) -> None:
    counts = ["--request-count", str(REQUESTS), "--concurrency", "2"]
    lengths = ["--prompt-input-tokens-mean", "20", "--prompt-output-tokens-mean", "8"]
    where = ["-m", MODEL, "--url", service.gateway.url, "--tokenizer", str(directory), "--endpoint-type", endpoint]
    what = ["--output-artifact-dir", str(tmp_path), "--ui", "none", *(["--streaming"] if streaming else [])]
    run("aiperf", "aiperf", "profile", *where, *counts, *lengths, *what)
    result = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert result["error_summary"] == []
    assert result["completed_request_count"]["avg"] == REQUESTS


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_guidellm_runs_without_an_error(service: World, directory: Path, tmp_path: Path, endpoint: str) -> None:
    result = tmp_path / "result.json"
    backend = f"kind=openai_http,target={service.gateway.url},model={MODEL},request_format={endpoint}"
    arguments = [
        *("--backend", backend),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={directory}"),
        *("--data", "kind=synthetic_text,prompt_tokens=20,output_tokens=8"),
        *("--output", f"kind=json,path={result}"),
        "--disable-console-interactive",
    ]
    run("guidellm", "guidellm", "run", *arguments, HF_HUB_OFFLINE="1")
    (benchmark,) = json.loads(result.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["errored"] == 0
    # It may end before the last answer is counted.
    assert totals["successful"] in (REQUESTS - 1, REQUESTS)


def test_open_responses_suite_fails_for_what_is_not_offered_alone(tmp_path: Path) -> None:
    runner = OPEN_RESPONSES / "node_modules/.bin/tsx"
    if not runner.exists():
        pytest.skip("no suite of Open Responses: `OPEN_RESPONSES=CLONE sh deploy/clients.sh` gets it, with git and npm")
    # Without reasoning: its events have OpenAI's names, `response.reasoning_text.*`, which the suite does not know.
    call = "<tool_call>get_weather<arg_key>location</arg_key><arg_value>Rome</arg_value></tool_call>"
    found = tmp_path / "results.json"
    with glm_service(tmp_path) as service, found.open("w") as results:
        service.says("</think>I look.\n" + call)
        arguments = ["--base-url", f"{service.gateway.url}/v1", "--api-key", "none", "--model", MODEL, "--json"]
        suite = OPEN_RESPONSES / "suite/bin/compliance-test.ts"
        # Before version 22, node has WebSockets only if it is asked for them.
        environment = {**os.environ, "NODE_OPTIONS": "--experimental-websocket"}
        subprocess.run([runner, suite, *arguments], env=environment, timeout=TIMEOUT_S, stdout=results, check=False)
    tests = {test["id"]: test for test in json.loads(found.read_text())["results"]}
    offered = {name: test for name, test in tests.items() if not name.startswith(NOT_OFFERED)}
    assert {"basic-response", "streaming-response", "websocket-continuation", "compact-response"} <= offered.keys()
    assert {name: test["errors"] for name, test in offered.items() if test["status"] != "passed"} == {}
