"""`hisparse-pd bench serving` against services that say what they are told to, and end to end on a tiny model."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from benchmarks.serving import services
from benchmarks.serving.stub import Reply, token_event
from tests.benchmarks.conftest import Json, bench, in_full, refusal, started
from tests.e2e.cluster import all_gone, children_of

TOKENS = ("--input-tokens", "5", "--output-tokens", "4")
BENCH = [sys.executable, "-m", "cli.main", "bench", "serving"]


def test_every_load_is_measured_at_every_service_without_warm_up(stub: Callable[..., str], tmp_path: Path) -> None:
    asked: list[Json] = []

    async def answer(request: Json, reply: Reply) -> None:
        asked.append(request)
        await in_full(request, reply)

    urls = ["--base-url", f"one={stub(answer)}", "--base-url", stub() + "/v1/"]
    content = bench(tmp_path, *TOKENS, *urls, "--concurrency", "1,3", "--num-requests", "6", "--warmup-requests", "2")
    points = content["points"]
    assert [(point["service"], point["load"]["value"]) for point in points[:2]] == [("one", "1"), ("one", "3")]
    assert len(points) == 4
    for point in points:
        assert point["answered"] == len(point["requests"]) == 6
        assert not any(point["counts"].values())
        assert point["input_tokens_per_s"] / point["output_tokens_per_s"] == pytest.approx(5 / 4)
        assert all(len(request["gaps"]) == 3 for request in point["requests"])
    assert len(asked) == 2 * (2 + 6)
    assert len({str(request["prompt"]) for request in asked}) == len(asked)
    assert asked[0] | {"prompt": 0} == {
        "model": "stub",
        "prompt": 0,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_what_was_asked_for_is_written_down_without_the_key(stub: Callable[..., str], tmp_path: Path) -> None:
    users: list[str] = []

    async def answer(request: Json, reply: Reply) -> None:
        users.append(request["user"])
        await in_full(request, reply)

    words = ["--quick", "--request-rate", "inf", "--num-requests", "1", "--api-key", "sk-secret"]
    content = bench(tmp_path, *TOKENS, "--base-url", stub(answer), *words, "--extra-body", '{"user": "me"}')
    assert set(users) == {"me"}
    assert (content["options"]["input_tokens"], content["options"]["output_tokens"]) == (5, 4)
    text = (tmp_path / "out.json").read_text()
    assert "sk-secret" not in text
    assert "Infinity" not in text


def test_failures_are_counted_by_kind_and_the_others_are_measured(
    stub: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[Json] = []

    async def answer(request: Json, reply: Reply) -> None:
        served.append(request)
        events: dict[int, Json | str] = {2: {"error": {"message": "no node is left"}}, 5: "{"}
        if len(served) == 1:
            return reply.whole(429, {"error": {"message": "all queues are full"}})
        if len(served) > 5:
            return await in_full(request, reply)
        reply.start()
        reply.event(events.get(len(served), token_event()))
        return reply.drop() if len(served) == 3 else reply.end()

    words = ["--concurrency", "1", "--num-requests", "7", "--warmup-requests", "0"]
    (point,) = bench(tmp_path, *TOKENS, "--base-url", stub(answer), *words)["points"]
    kinds = ("HTTP 429", "error event", "broken connection", "broken off", "malformed event")
    assert point["failed"] == dict.fromkeys(kinds, 1)
    assert point["answered"] == 2
    assert "1 failed: HTTP 429: all queues are full" in capsys.readouterr().out


def test_a_request_that_takes_too_long_is_given_up(stub: Callable[..., str], tmp_path: Path) -> None:
    async def answer(request: Json, reply: Reply) -> None:
        if request["max_tokens"] == 1:
            await asyncio.Event().wait()
        await in_full(request, reply)

    prompts = tmp_path / "prompts"
    prompts.write_text('{"prompt": [1]}\n{"prompt": [1], "output_tokens": 1}\n')
    words = ["--concurrency", "1", "--num-requests", "2", "--warmup-requests", "0", "--request-timeout", "2"]
    (point,) = bench(tmp_path, *TOKENS, "--base-url", stub(answer), "--prompts", str(prompts), *words)["points"]
    assert point["failed"] == {"timeout": 1}
    assert point["answered"] == 1


def test_no_answer_is_an_error(stub: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def answer(request: Json, reply: Reply) -> None:
        reply.whole(500, {"error": {"message": "out of order"}})

    words = ["--base-url", stub(answer), "--concurrency", "2", "--num-requests", "2"]
    bench(tmp_path, *TOKENS, *words, "--warmup-requests", "0", code=1)
    assert "answered no request at 2" in capsys.readouterr().err
    assert "answers no request: HTTP 500: out of order" in refusal(capsys, "serving", *words)


@pytest.mark.slow
def test_a_tiny_model_is_served_measured_and_stopped(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]
    small = ["--input-tokens", "100", "--output-tokens", "8", "--concurrency", "2", "--num-requests", "4"]
    sizes = ['{"device_buffer_size": 64}', '{"device_buffer_size": 96}']
    configs = ["--hisparse-config", sizes[0], "--compare-hisparse-config", sizes[1]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started_here: set[psutil.Process] = set()
    with started([*BENCH, *small, *configs, *files], **pipes) as process:
        while process.poll() is None:
            started_here.update(children_of(process))
            try:
                out, err = process.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                continue
        assert process.returncode == 0, err
    assert len(started_here) >= 2 * 4, "serve and its three processes, twice"
    assert all_gone(started_here)
    first, second = json.loads((tmp_path / "out.json").read_text())["points"]
    assert [first["service"], second["service"]] == sizes
    for point in (first, second):
        assert point["answered"] == 4
        assert point["counts"] == {"no_usage": 0, "miscounted": 0, "short": 0, "other_prompt": 0}
        assert point["counted_by_nodes"]["prompt_tokens_total"] == 4 * 99, "the decode node computes the last one"
        assert point["counted_by_nodes"]["transfer_bytes_total"] > 0
    assert "rates, per second" in out


@pytest.mark.parametrize(
    ("later", "reason"),
    [
        (["--compare-hisparse-config", '{"top_k": 3}'], "top_k is 3, but the model selects"),
        (["--variant", "--no-such-flag"], "No such option: --no-such-flag"),
    ],
)
def test_every_service_is_checked_before_the_first_is_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], later: list[str], reason: str
) -> None:
    monkeypatch.setattr(services.Local, "running", lambda service: pytest.fail(f"started {service}"))
    variants = ["--variant", ""] if "--variant" in later else []
    assert reason in refusal(capsys, "serving", "--quick", *variants, *later)


def test_what_was_measured_is_kept_if_a_later_service_fails(
    stub: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.Remote, "check", lambda service: None)
    urls = ["--base-url", f"one={stub()}", "--base-url", "gone=http://127.0.0.1:1"]
    content = bench(tmp_path, *TOKENS, *urls, "--concurrency", "1", "--num-requests", "2", code=2)
    assert [point["service"] for point in content["points"]] == ["one"]
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: no service answers at http://127.0.0.1:1")
