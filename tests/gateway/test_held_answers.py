"""What answers take in a gateway is bounded, and costs only the request that takes it."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from control.messages import Output
from gateway import decode_client, registry
from gateway.errors import ApiError
from tests.gateway.nodes import wait_until
from tests.gateway.world import LONG_CONTEXT, MODEL, RunningGateway, World, held_answers, write_checkpoint
from tests.service.raw_http import RawClient

TOKENS = 4096
CHOICES = 8
CHUNKS = [list(b"abcdefgh" * 8)] * (TOKENS // 64)
HOSTILE: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "n": CHOICES, "logprobs": 20},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "n": CHOICES,
        "logprobs": True,
        "top_logprobs": 20,
    },
    "/v1/responses": {"input": "a", "top_logprobs": 20},
}


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode node is in the gateway's process, and says nothing while a large answer is made."""
    for module in (decode_client, registry):
        monkeypatch.setattr(module, "SILENT_AFTER_S", 60.0)


class SlowestCallback:
    """The longest processor time of one callback of a gateway's loop."""

    def __init__(self, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        run = asyncio.Handle._run

        def timed(handle: asyncio.Handle) -> None:
            began = time.thread_time()
            run(handle)
            if handle._loop is gateway._loop:  # type: ignore[attr-defined]
                self.seconds = max(self.seconds, time.thread_time() - began)

        monkeypatch.setattr(asyncio.Handle, "_run", timed)


@pytest.fixture
def no_collections() -> Iterator[None]:
    """A gateway has few of them, but here other tests have left much to look at."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with World(
        write_checkpoint(tmp_path_factory.mktemp("checkpoint"), None, LONG_CONTEXT), max_answer_mib=64
    ) as service:
        yield service


@pytest.mark.parametrize(
    ("path", "stream"), [*((path, False) for path in HOSTILE), ("/v1/responses", True)], ids=lambda value: str(value)
)
def test_many_log_probabilities_do_not_hold_up_the_loop(
    service: World, no_collections: None, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    service.decode.reset()
    service.decode.chunks = CHUNKS if "n" in HOSTILE[path] else CHUNKS * (LONG_CONTEXT // TOKENS - 1)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {"model": MODEL, limit: LONG_CONTEXT - TOKENS, "stream": stream, **HOSTILE[path]}
    slowest = SlowestCallback(service.gateway, monkeypatch)
    answer = service.http.post(path, json=body, timeout=120)
    assert answer.status_code == 200
    assert slowest.seconds < 0.25
    assert len(answer.content) > 1 << 22


def test_others_are_answered_while_a_large_answer_is_made(service: World) -> None:
    service.decode.reset()
    service.decode.chunks = CHUNKS
    url = f"{service.gateway.url}/v1/completions"
    body = {"model": MODEL, "max_tokens": TOKENS, **HOSTILE["/v1/completions"]}
    hostile: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: hostile.append(httpx.post(url, json=body, timeout=120)))
    thread.start()
    wait_until(lambda: service.decode.generated)
    answered = 0
    while thread.is_alive():
        answered += service.http.get("/v1/models", timeout=60).status_code == 200
    thread.join()
    assert answered
    choices = hostile[0].json()["choices"]
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [TOKENS] * CHOICES
    wait_until(lambda: service.gateway.gateway._answers.held == 0)


LARGE = {"model": MODEL, "prompt": "a", "max_tokens": 500, "logprobs": 20}
LARGE_CHAT = {**HOSTILE["/v1/chat/completions"], "model": MODEL, "max_tokens": 500}


@pytest.mark.parametrize("fresh", [{"max_answer_mib": 1}], indirect=True)
def test_a_request_of_large_answers_ends_alone(fresh: World) -> None:
    fresh.decode.hold_after = 400
    url = f"{fresh.gateway.url}/v1/completions"
    answer = httpx.post(url, json=LARGE | {"n": 16}, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "answer_too_large")
    assert "1048576 bytes" in error["message"]
    assert "logprobs" in error["message"]
    assert fresh.gateway.counted("answers_ended", "too_large") == 1
    wait_until(lambda: len(fresh.decode.cancelled) == 16)
    wait_until(lambda: fresh.gateway.gateway._answers.held == 0)
    fresh.decode.hold_after = None
    assert fresh.client.completions.create(**LARGE).choices[0].logprobs is not None


@pytest.mark.parametrize("fresh", [{"max_answer_mib": 1, "max_total_answer_mib": 1}], indirect=True)
def test_where_all_answers_take_too_much_the_largest_ends(fresh: World) -> None:
    """The small ones are too few to be too much, even where the loop has yet to take all that has arrived."""
    url = f"{fresh.gateway.url}/v1/completions"
    fresh.decode.hold_after = 50
    with ThreadPoolExecutor() as clients:
        small = [clients.submit(httpx.post, url, json=LARGE | {"n": n}, timeout=60) for n in (1, 2)]
        wait_until(
            lambda: len(fresh.decode.generated) == 3 and fresh.gateway.gateway._answers.held > 20_000, timeout=60
        )
        fresh.decode.hold_after = 400
        large = httpx.post(url, json=LARGE | {"n": 16}, timeout=60)
        assert (large.status_code, large.headers["Retry-After"]) == (503, "1")
        assert fresh.gateway.counted("answers_ended", "too_many_bytes") == 1
        assert not any(answer.done() for answer in small), "the others go on"
        for request in fresh.decode.generated[:3]:
            last = Output(request_id=request.request_id, start=50, finish_reason="stop")
            fresh.decode.send(last)
        assert [answer.result().status_code for answer in small] == [200, 200]


@pytest.mark.parametrize("fresh", [{"max_answer_mib": 1}], indirect=True)
def test_a_stream_that_its_client_does_not_read_is_bounded(fresh: World) -> None:
    fresh.decode.chunks = [[number % 256] * 16 for number in range(25)]
    body = json.dumps(LARGE | {"n": 32, "max_tokens": 400, "stream": True})
    with RawClient(fresh.gateway.gateway.port, receive_buffer=4096) as client:
        client.post("/v1/completions", f"Content-Length: {len(body)}", body=body)
        wait_until(lambda: fresh.gateway.counted("answers_ended", "too_large") == 1, timeout=60)
        assert fresh.gateway.gateway._answers.held < 2 << 20
    wait_until(lambda: fresh.gateway.gateway._answers.held == 0, timeout=60)


@pytest.mark.parametrize("fresh", [{"max_answer_mib": 8, "max_total_answer_mib": 8}], indirect=True)
def test_an_answer_that_its_client_does_not_read_gives_way(fresh: World) -> None:
    """Few tokens with the log probabilities of a long prompt: what waits for the loop is less than the answer."""
    body = json.dumps({"prompt": "a" * 450, "max_tokens": 1, "n": 16, "prompt_logprobs": 20})
    with RawClient(fresh.gateway.gateway.port, receive_buffer=4096) as client:
        client.post("/v1/completions", f"Content-Length: {len(body)}", body=body)
        wait_until(lambda: len(fresh.decode.ended) == 16 and fresh.gateway.gateway._answers.held > 7 << 20, timeout=60)
        other = fresh.http.post("/v1/chat/completions", json=LARGE_CHAT | {"n": 3}, timeout=60)
        assert other.status_code == 200
        assert fresh.gateway.counted("answers_ended", "too_many_bytes") == 1
    wait_until(lambda: fresh.gateway.gateway._answers.held == 0, timeout=60)


def test_the_largest_request_ends_and_others_go_on() -> None:
    answers = held_answers(per_request=80, total=100)
    large, small = answers.account(), answers.account()
    large.take(70)
    small.take(30)
    small.take(10)
    small.take(30)
    assert answers.held == 140, "that of the large one is about to be gone"
    with pytest.raises(ApiError, match="as many bytes of answers as it may") as busy:
        large.take(1)
    assert (busy.value.status, busy.value.retry_after) == (503, 1.0)
    large.close()
    assert answers.held == 70
    with pytest.raises(ApiError, match="more than 80 bytes") as too_large:
        answers.account().take(81)
    assert too_large.value.status == 400


def test_a_request_that_is_to_end_counts_no_more_and_ends_once() -> None:
    answers = held_answers(per_request=10)
    account = answers.account()
    for _ in range(3):
        with pytest.raises(ApiError):
            account.take(11)
    assert answers.held == account.held == 0


def test_complete_answers_that_are_sent_are_ended_too() -> None:
    answers = held_answers(total=100)
    sent, growing = answers.account(), answers.account()
    aborted: list[bool] = []
    sent.take(40)
    sent.settle(60)
    assert answers.held == 60
    sent.abort = lambda: aborted.append(True)
    growing.take(50)
    assert aborted
    with pytest.raises(ApiError, match="as many bytes of answers as it may"):
        sent.settle(70)
    sent.close()
    assert answers.held == 50
