"""Nodes that refuse, die, fall silent or lie, and clients that leave."""

import json
import socket
import threading

import pytest
import zmq

from control.codec import PROTOCOL_VERSION
from control.messages import FinishReason, Output
from tests.control.test_versions import Foreign
from tests.gateway.nodes import CONTEXT, wait_until
from tests.gateway.world import RunningGateway, World

BODY = {"prompt": "abc", "max_tokens": 100}


def test_not_ready_without_nodes(fresh: World) -> None:
    fresh.leaves(fresh.decode)
    ready = fresh.http.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["reason"] == "no live decode node is registered"
    answer = fresh.post()
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "no live decode node" in answer.json()["error"]["message"]
    assert fresh.http.get("/health").status_code == 200


def test_a_node_of_another_wire_version_is_refused(fresh: World) -> None:
    fresh.leaves(fresh.decode)
    newer = Foreign(PROTOCOL_VERSION + 1, "decode")
    for kind in ("Register", "Heartbeat", "Leaving"):
        newer.send(fresh.gateway.control_address, kind, {"via": fresh.gateway.control_address})
    for _ in range(2):
        _, answer = newer.receive("Refused")
        assert f"wire version {PROTOCOL_VERSION + 1} != {PROTOCOL_VERSION} of this gateway" in str(answer["reason"])
    wait_until(lambda: 'control_refused{reason="version"} 3.0' in fresh.metrics())
    assert fresh.http.get("/ready").json()["reason"] == "no live decode node is registered"
    newer.close()


def test_full_nodes_are_passed_over(fresh: World) -> None:
    fresh.decode.reject = "queue_full"
    other = fresh.start_full_decode()
    assert fresh.post().status_code == 200
    assert len(other.generated) == 1
    other.reject = "queue_full"
    answer = fresh.post(stream=True)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    # Nothing sticks.
    fresh.decode.reject = None
    assert fresh.post().status_code == 200


def test_other_refusals(fresh: World) -> None:
    fresh.decode.reject = "too_long"
    answer = fresh.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert answer.json()["error"]["message"].startswith("This model's maximum context length is ")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    answer = fresh.http.post("/v1/messages", json=body)
    assert answer.json()["error"]["message"].startswith("prompt is too long: ")
    fresh.decode.reject = "draining"
    assert fresh.post().status_code == 503


def test_requests_beyond_every_decode_node(fresh: World) -> None:
    fresh.leaves(fresh.decode)
    fresh.start_decode(max_request_tokens=50)
    answer = fresh.post()
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "model's maximum context length is 50 tokens. However, 103 were" in answer.json()["error"]["message"]


def test_a_chat_fills_the_largest_decode_node(fresh: World) -> None:
    """If it has no max_tokens."""
    fresh.leaves(fresh.decode)
    assert fresh.http.get("/v1/models/tiny").json()["max_model_len"] == CONTEXT
    fresh.start_decode(max_request_tokens=50)
    larger = fresh.start_decode(max_request_tokens=60)
    assert fresh.http.get("/v1/models/tiny").json()["max_model_len"] == 60
    answer = fresh.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert answer.json()["usage"]["total_tokens"] == 60
    assert len(larger.generated) == 1


def test_a_prompt_that_no_prefill_node_takes_is_refused_at_once(fresh: World) -> None:
    fresh.leaves(fresh.prefill)
    small = fresh.start_prefill(max_request_tokens=50)
    answer = fresh.post(prompt="a" * 51)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "of which 50 can be computed now. However, the prompt has 51" in answer.json()["error"]["message"]
    larger = fresh.start_prefill()
    assert fresh.post(prompt="a" * 51).status_code == 200
    [asked] = fresh.decode.generated
    assert asked.prefill_nodes == (larger.me, small.me)
    assert asked.longest_prompts == {larger.me.boot_id: CONTEXT, small.me.boot_id: 50}


def test_client_that_leaves_mid_stream_cancels(fresh: World) -> None:
    fresh.decode.hold_after = 3
    with fresh.stream() as data:
        assert json.loads(next(data))["choices"][0]["text"] == "a"
    wait_until(lambda: fresh.decode.cancelled)
    wait_until(lambda: 'finished_total{reason="cancelled"} 1.0' in fresh.metrics())


@pytest.mark.parametrize(("stream", "hold_after"), [(False, 3), (True, 0)])
def test_client_that_leaves_while_it_waits_cancels(fresh: World, stream: bool, hold_after: int) -> None:
    fresh.decode.hold_after = hold_after
    content = json.dumps({**BODY, "stream": stream}).encode()
    with socket.create_connection(("127.0.0.1", fresh.gateway.gateway.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        wait_until(lambda: fresh.decode.generated)
    wait_until(lambda: fresh.decode.cancelled)


@pytest.mark.parametrize(("said", "restarts"), [(0, True), (2, True), (0, False)])
def test_an_answer_that_does_not_stream_goes_on_elsewhere(fresh: World, said: int, restarts: bool) -> None:
    """At another node, or at the same address after a restart."""
    fresh.decode.hold_after = said
    posted = fresh.post_later(max_tokens=5, seed=7)
    wait_until(lambda: f'requests{{state="{"running" if said else "waiting"}"}} 1.0' in fresh.metrics())
    wait_until(lambda: fresh.decode.generated)
    other = None if restarts else fresh.start_decode()
    fresh.decode.die()
    other = other or fresh.start_decode(port=fresh.decode.port)
    answer = posted.result().json()
    assert answer["choices"][0]["text"] == "abcab"
    assert answer["usage"]["completion_tokens"] == 5
    [before], [after] = fresh.decode.generated, other.generated
    own = {"request_id": f"{before.request_id}.2", "generated": before.prompt_ids[:said]}
    assert after == before.model_copy(update=own), "the same request, seed and all"
    assert 'requests_finished_total{reason="length"} 1.0' in fresh.metrics()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish_reason", ["error", "abort"])
def test_clients_do_not_learn_what_went_wrong_inside(fresh: World, stream: bool, finish_reason: FinishReason) -> None:
    reason = "prefill node 10.0.0.7:8011 is silent"
    fresh.decode.chunks = [[97]]
    fresh.decode.extra_outputs = [Output(request_id="-", start=1, finish_reason=finish_reason, error=reason)]
    answer = fresh.post(stream=stream)
    assert "10.0.0.7" not in answer.text
    assert fresh.decode.me.address not in answer.text
    if stream or finish_reason == "error":
        assert f"at its decode node (request {fresh.decode.generated[0].request_id})" in answer.text
    else:
        assert answer.status_code == 503


@pytest.mark.parametrize("fresh", [{"request_timeout": 0.3}, {"token_timeout": 0.3}], indirect=True)
def test_deadline(fresh: World) -> None:
    fresh.decode.hold_after = 0
    answer = fresh.post()
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    wait_until(lambda: fresh.decode.cancelled)


class SlowTokenizer:
    """Takes until told to go on with prompts of more than 64 KiB."""

    def __init__(self, gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
        tokenizer = gateway.gateway._completer.tokenizer
        encode = tokenizer.encode
        self.busy = threading.Semaphore(0)
        self.go_on = threading.Event()

        def slow(text: str, *, special_tokens: bool) -> list[int]:
            if len(text) > 64 << 10:
                self.busy.release()
                assert self.go_on.wait(timeout=20)
            return encode(text, special_tokens=special_tokens)

        monkeypatch.setattr(tokenizer, "encode", slow)


def test_long_tokenizing_delays_no_small_prompts(fresh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SlowTokenizer(fresh.gateway, monkeypatch)
    huge = [fresh.post_later(prompt="a" * 70_000) for _ in range(4)]
    assert tokenizer.busy.acquire(timeout=20)
    assert tokenizer.busy.acquire(timeout=20), "two at a time"
    assert fresh.post().status_code == 200
    tokenizer.go_on.set()
    for posted in huge:
        assert posted.result().json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("fresh", [{"request_timeout": 0.3}], indirect=True)
def test_the_request_timeout_covers_tokenizing(fresh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = SlowTokenizer(fresh.gateway, monkeypatch)
    answer = fresh.post(prompt="a" * 70_000)
    tokenizer.go_on.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


def test_garbage_on_the_control_port_changes_nothing(fresh: World) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as pusher:
        pusher.connect(f"tcp://{fresh.gateway.control_address}")
        for frame in (b"", b"garbage", b"\xc1" * 100, b"\x81\xa1v\x01", bytes(range(256))):
            pusher.send(frame)
        wait_until(lambda: "control_malformed 5.0" in fresh.metrics())
    assert fresh.post().status_code == 200
