"""Nodes that refuse, die, fall silent or lie, clients that leave, and gateways that stop."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import httpx
import openai
import pytest
import zmq

from control.codec import PROTOCOL_VERSION
from control.messages import FinishReason, Output, Peer, Resend, Token
from control.plane import ControlPlaneFailed
from gateway import decode_client
from tests.control.test_versions import Foreign
from tests.gateway.world import CONTEXT, IDENTITY, MODEL, FakeDecodeNode, FakeNode, RunningGateway, World, wait_until

StartDecode = Callable[..., FakeDecodeNode]


def body(**changes: object) -> dict[str, object]:
    return {"prompt": "abc", "max_tokens": 100} | changes


@pytest.fixture
def background() -> Iterator[Executor]:
    with ThreadPoolExecutor(4) as threads:
        yield threads


def test_not_ready_without_nodes(http: httpx.Client, prefill: FakeNode) -> None:
    ready = http.get("/ready")
    assert ready.status_code == 503
    assert ready.json()["reason"] == "no live decode node is registered"
    answer = http.post("/v1/completions", json=body())
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
    assert "no live decode node" in answer.json()["error"]["message"]
    assert http.get("/health").status_code == 200


def test_a_node_of_another_dtype_is_refused(
    decode: FakeDecodeNode, gateway: RunningGateway, http: httpx.Client
) -> None:
    identity = IDENTITY.model_copy(update={"dtype": "torch.bfloat16"})
    other = FakeNode(gateway.control_address, "prefill", identity=identity).start()
    other.die()
    assert "dtype torch.bfloat16 != torch.float32 of" in other.refusals[0]
    assert http.post("/v1/completions", json=body()).status_code == 200


def test_a_node_of_another_wire_version_is_refused_and_takes_no_requests(
    gateway: RunningGateway, prefill: FakeNode, http: httpx.Client
) -> None:
    """A rollout of a new version showed nothing but malformed messages."""
    newer = Foreign(PROTOCOL_VERSION + 1, "decode")
    for kind in ("Register", "Heartbeat", "Leaving"):
        newer.send(gateway.control_address, kind, {"via": gateway.control_address})
    for _ in range(2):
        _, answer = newer.receive("Refused")
        assert f"wire version {PROTOCOL_VERSION + 1} != {PROTOCOL_VERSION} of this gateway" in str(answer["reason"])
    wait_until(lambda: 'control_refused{reason="version"} 3.0' in http.get("/metrics").text)
    assert http.get("/ready").json()["reason"] == "no live decode node is registered"
    newer.close()


def test_decode_nodes_learn_the_prefill_nodes(decode: FakeDecodeNode, prefill: FakeNode) -> None:
    wait_until(lambda: decode.prefill_nodes == (prefill.me,))


def test_full_nodes_are_passed_over(decode: FakeDecodeNode, start_decode: StartDecode, http: httpx.Client) -> None:
    decode.reject = "queue_full"
    other = start_decode(queued_tokens=10**6)
    wait_until(lambda: 'nodes{role="decode"} 2.0' in http.get("/metrics").text)
    assert http.post("/v1/completions", json=body()).status_code == 200
    assert len(other.generated) == 1
    other.reject = "queue_full"
    answer = http.post("/v1/completions", json=body(stream=True))
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "7")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    # Nothing sticks.
    decode.reject = None
    assert http.post("/v1/completions", json=body()).status_code == 200


def test_other_refusals(decode: FakeDecodeNode, http: httpx.Client) -> None:
    decode.reject = "too_long"
    answer = http.post("/v1/completions", json=body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    decode.reject = "draining"
    assert http.post("/v1/completions", json=body()).status_code == 503


def test_requests_beyond_every_decode_node(prefill: FakeNode, start_decode: StartDecode, http: httpx.Client) -> None:
    start_decode(max_request_tokens=50)
    answer = http.post("/v1/completions", json=body())
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length is 50 tokens, but 103 were" in answer.json()["error"]["message"]


def test_a_chat_without_max_tokens_fills_the_largest_decode_node(
    prefill: FakeNode, start_decode: StartDecode, http: httpx.Client
) -> None:
    assert http.get("/v1/models/tiny").json()["max_model_len"] == CONTEXT
    start_decode(max_request_tokens=50)
    larger = start_decode(max_request_tokens=60)
    assert http.get("/v1/models/tiny").json()["max_model_len"] == 60
    answer = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert answer.json()["usage"]["total_tokens"] == 60
    assert len(larger.generated) == 1


def test_a_prompt_that_no_prefill_node_takes_is_refused_at_once(
    gateway: RunningGateway, start_decode: StartDecode, http: httpx.Client
) -> None:
    small = FakeNode(gateway.control_address, "prefill", max_request_tokens=50).start()
    decode = start_decode()
    answer = http.post("/v1/completions", json=body(prompt="a" * 51))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert "has 50 tokens, but the prompt has 51" in answer.json()["error"]["message"]
    larger = FakeNode(gateway.control_address, "prefill").start()
    assert http.post("/v1/completions", json=body(prompt="a" * 51)).status_code == 200
    assert decode.generated[0].prefill_nodes == (larger.me, small.me)
    assert decode.generated[0].longest_prompts == {larger.me.boot_id: CONTEXT, small.me.boot_id: 50}
    small.die()
    larger.die()


def test_client_that_leaves_mid_stream_cancels(
    decode: FakeDecodeNode, client: openai.OpenAI, http: httpx.Client
) -> None:
    decode.hold_after = 3
    stream = client.completions.create(model=MODEL, prompt="abc", max_tokens=100, stream=True)
    assert next(iter(stream)).choices[0].text == "a"
    stream.close()
    wait_until(lambda: decode.cancelled)
    wait_until(lambda: 'finished_total{reason="cancelled"} 1.0' in http.get("/metrics").text)


@pytest.mark.parametrize(("stream", "hold_after"), [(False, 3), (True, 0)])
def test_client_that_leaves_while_it_waits_cancels(
    gateway: RunningGateway, decode: FakeDecodeNode, stream: bool, hold_after: int
) -> None:
    decode.hold_after = hold_after
    content = json.dumps(body(stream=stream)).encode()
    with socket.create_connection(("127.0.0.1", gateway.gateway.port)) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
        connection.sendall(head.encode() + content)
        wait_until(lambda: decode.generated)
    wait_until(lambda: decode.cancelled)


def test_decode_node_restarted_before_the_first_token(
    gateway: RunningGateway, decode: FakeDecodeNode, start_decode: StartDecode, http: httpx.Client, background: Executor
) -> None:
    decode.hold_after = 0
    posted = background.submit(http.post, "/v1/completions", json=body())
    wait_until(lambda: decode.generated)
    decode.die()
    start_decode(port=decode.port)
    assert posted.result().json()["choices"][0]["text"] == ("abc" * 34)[:100]


def test_decode_node_silent_before_the_first_token(
    decode: FakeDecodeNode, start_decode: StartDecode, http: httpx.Client, background: Executor
) -> None:
    decode.hold_after = 0
    posted = background.submit(http.post, "/v1/completions", json=body())
    wait_until(lambda: decode.generated)
    other = start_decode()
    decode.die()
    assert posted.result().status_code == 200
    assert len(other.generated) == 1


def test_an_answer_that_does_not_stream_begins_anew_at_another_node(
    decode: FakeDecodeNode, start_decode: StartDecode, http: httpx.Client, background: Executor
) -> None:
    decode.hold_after = 2
    posted = background.submit(http.post, "/v1/completions", json=body(max_tokens=5, seed=7))
    wait_until(lambda: 'requests{state="running"} 1.0' in http.get("/metrics").text)
    decode.die()
    other = start_decode(port=decode.port)
    answer = posted.result().json()
    assert answer["choices"][0]["text"] == "abcab"
    assert answer["usage"]["completion_tokens"] == 5
    assert other.generated == decode.generated, "the same request, seed and all"
    assert 'requests_finished_total{reason="length"} 1.0' in http.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish_reason", ["error", "abort"])
def test_clients_do_not_learn_what_went_wrong_inside(
    decode: FakeDecodeNode, http: httpx.Client, stream: bool, finish_reason: FinishReason
) -> None:
    reason = "prefill node 10.0.0.7:8011 is silent"
    decode.chunks = [[97]]
    decode.extra_outputs = [Output(request_id="-", start=1, finish_reason=finish_reason, error=reason)]
    answer = http.post("/v1/completions", json=body(stream=stream))
    assert "10.0.0.7" not in answer.text
    assert decode.me.address not in answer.text
    if stream or finish_reason == "error":
        assert f"at its decode node (request {decode.generated[0].request_id})" in answer.text
    else:
        assert answer.status_code == 503


def test_decode_node_dies_after_the_first_token(
    decode: FakeDecodeNode, start_decode: StartDecode, http: httpx.Client
) -> None:
    decode.hold_after = 2
    with http.stream("POST", "/v1/completions", json=body(stream=True)) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        assert [json.loads(next(lines))["choices"][0]["text"] for _ in range(2)] == ["a", "b"]
        decode.die()
        other = start_decode(port=decode.port)
        rest = list(lines)
    assert rest[1:] == ["[DONE]"]
    assert "lost at its decode node" in json.loads(rest[0])["error"]["message"]
    assert not other.generated


def test_deadline(start_world: Callable[..., World]) -> None:
    hasty = start_world(request_timeout=0.3)
    hasty.decode.hold_after = 0
    answer = httpx.post(f"{hasty.gateway.url}/v1/completions", json=body())
    assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout_error")
    wait_until(lambda: hasty.decode.cancelled)


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


def test_prompts_that_take_long_to_tokenize_delay_no_small_ones(
    gateway: RunningGateway,
    decode: FakeDecodeNode,
    http: httpx.Client,
    monkeypatch: pytest.MonkeyPatch,
    background: Executor,
) -> None:
    tokenizer = SlowTokenizer(gateway, monkeypatch)
    huge = [
        background.submit(httpx.post, f"{gateway.url}/v1/completions", json=body(prompt="a" * 70_000), timeout=20)
        for _ in range(4)
    ]
    assert tokenizer.busy.acquire(timeout=20)
    assert tokenizer.busy.acquire(timeout=20), "two at a time"
    assert http.post("/v1/completions", json=body()).status_code == 200
    tokenizer.go_on.set()
    for posted in huge:
        assert posted.result().json()["error"]["code"] == "context_length_exceeded"


def test_the_request_timeout_covers_tokenizing(
    start_gateway: Callable[..., RunningGateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = start_gateway(request_timeout=0.3)
    tokenizer = SlowTokenizer(hasty, monkeypatch)
    answer = httpx.post(f"{hasty.url}/v1/completions", json=body(prompt="a" * 70_000))
    tokenizer.go_on.set()
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


def test_stopping_gateway_cancels_what_is_in_flight(
    gateway: RunningGateway, decode: FakeDecodeNode, http: httpx.Client
) -> None:
    decode.hold_after = 1
    with http.stream("POST", "/v1/completions", json=body(stream=True)) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(lines)
        gateway.stop()
        assert "shutting down" in next(lines)
    assert len(decode.cancelled) == 1


def test_a_draining_gateway_lets_streams_finish_and_takes_no_more(
    gateway: RunningGateway, decode: FakeDecodeNode, http: httpx.Client
) -> None:
    decode.hold_after = 1
    with http.stream("POST", "/v1/completions", json=body(max_tokens=3, stream=True)) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(lines)
        gateway.drain()
        with httpx.Client(base_url=gateway.url, timeout=20) as other:
            wait_until(lambda: other.get("/ready").status_code == 503)
            assert other.get("/ready").json()["reason"] == "draining"
            assert other.get("/health").status_code == 200
            answer = other.post("/v1/completions", json=body())
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.headers["Connection"] == "close"
        assert answer.json()["error"]["code"] == "draining"
        [asked] = decode.generated
        rest = Output(
            request_id=asked.request_id,
            start=1,
            tokens=(Token(token_id=98), Token(token_id=99)),
            finish_reason="length",
        )
        decode.send(gateway.gateway.control.me, rest)
        assert json.loads(next(lines))["choices"][0]["text"] == "bc"
        assert list(lines) == ["[DONE]"]
    gateway.join()
    assert decode.cancelled == []


def test_an_idle_gateway_drains_at_once(gateway: RunningGateway, decode: FakeDecodeNode) -> None:
    gateway.drain()
    gateway.join()


def test_what_streams_at_the_drain_timeout_is_ended(start_world: Callable[..., World]) -> None:
    hasty = start_world(drain_timeout=0.3)
    hasty.decode.hold_after = 1
    with httpx.stream("POST", f"{hasty.gateway.url}/v1/completions", json=body(stream=True), timeout=20) as response:
        lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
        next(lines)
        hasty.gateway.drain()
        assert "shutting down" in next(lines)
    hasty.gateway.join()
    assert len(hasty.decode.cancelled) == 1


def test_restarted_gateway_finds_the_nodes_again(
    gateway: RunningGateway, decode: FakeDecodeNode, start_gateway: Callable[..., RunningGateway]
) -> None:
    gateway.stop()
    again = start_gateway(control_port=int(gateway.control_address.rpartition(":")[2]))
    wait_until(lambda: httpx.get(f"{again.url}/ready").status_code == 200)
    assert httpx.post(f"{again.url}/v1/completions", json=body()).status_code == 200


def test_garbage_on_the_control_port_changes_nothing(
    gateway: RunningGateway, decode: FakeDecodeNode, http: httpx.Client
) -> None:
    context = zmq.Context()
    pusher = context.socket(zmq.PUSH)
    pusher.connect(f"tcp://{gateway.control_address}")
    for frame in (b"", b"garbage", b"\xc1" * 100, b"\x81\xa1v\x01", bytes(range(256))):
        pusher.send(frame)
    pusher.close()
    context.term()
    wait_until(lambda: "control_malformed 5.0" in http.get("/metrics").text)
    assert http.post("/v1/completions", json=body()).status_code == 200


def test_the_end_of_a_request_is_answered_each_time_and_counts_once(decode: FakeDecodeNode, http: httpx.Client) -> None:
    """It is repeated until it is answered: were it lost, the client would wait until --request-timeout."""
    last = Output(request_id="replaced", start=2, tokens=(Token(token_id=99),), finish_reason="length")
    decode.extra_outputs = [last, last]
    answer = http.post("/v1/completions", json=body(max_tokens=3, return_token_ids=True))
    assert answer.status_code == 200
    [choice] = answer.json()["choices"]
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (3, "length")
    wait_until(lambda: len(decode.ended) == 2)
    assert len(set(decode.ended)) == 1
    assert decode.cancelled == []


def script(count: int) -> list[list[int]]:
    """The alphabet, a letter in each message."""
    return [[ord("a") + number] for number in range(count)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("lost", "asked_from"),
    [({1}, [1]), ({0, 1}, [0]), ({2, 3, 5}, [2]), ({6}, [6]), ({1, 7}, [1]), (set(range(7)), [0])],
)
def test_tokens_that_were_lost_on_the_way_are_asked_for_again(
    decode: FakeDecodeNode, client: openai.OpenAI, stream: bool, lost: set[int], asked_from: list[int]
) -> None:
    """The stream ended with an error, although the decode node had them."""
    decode.chunks, decode.lost = script(8), frozenset(lost)
    answer = client.completions.create(model=MODEL, prompt="x", max_tokens=8, stream=stream, logprobs=2)
    if stream:
        choices = [chunk.choices[0] for chunk in answer]
        text = "".join(choice.text for choice in choices)
        logprobs = [logprob for choice in choices if choice.logprobs for logprob in choice.logprobs.token_logprobs]
    else:
        [choice] = answer.choices
        text, logprobs = choice.text, choice.logprobs.token_logprobs
    assert text == "abcdefgh"
    assert logprobs == [-0.5] * 8
    assert sorted({asked.start for asked in decode.resent}) == asked_from
    assert decode.cancelled == []
    wait_until(lambda: set(decode.ended) == {decode.generated[0].request_id})


def test_a_request_for_tokens_is_repeated_until_it_is_answered(decode: FakeDecodeNode, http: httpx.Client) -> None:
    decode.chunks, decode.lost, decode.deaf_to_resend = script(4), frozenset({1}), 2
    assert http.post("/v1/completions", json=body(max_tokens=4)).json()["choices"][0]["text"] == "abcd"
    assert {asked.start for asked in decode.resent} == {1}
    assert len(decode.resent) >= 3
    wait_until(lambda: decode.ended)


def test_what_is_lost_of_what_was_sent_again_is_asked_for_from_there(
    decode: FakeDecodeNode, http: httpx.Client
) -> None:
    decode.chunks, decode.lost = script(8), frozenset({1})
    resend = decode._resend

    def some_is_lost(sender: Peer, asked: Resend) -> None:
        if asked.start == 1:
            for number in (1, 2, 5, 6, 7):
                decode.send(sender, decode._answers[asked.request_id][number])
        else:
            resend(sender, asked)

    decode._resend = some_is_lost  # type: ignore[method-assign]
    assert http.post("/v1/completions", json=body(max_tokens=8)).json()["choices"][0]["text"] == "abcdefgh"
    assert list(dict.fromkeys(asked.start for asked in decode.resent)) == [1, 3]


def test_an_end_is_not_acknowledged_while_tokens_before_it_are_missing(
    decode: FakeDecodeNode, http: httpx.Client, background: Executor
) -> None:
    """The decode node would forget them."""
    decode.chunks, decode.lost, decode.deaf_to_resend = script(3), frozenset({1}), 1000
    posted = background.submit(http.post, "/v1/completions", json=body(max_tokens=3))
    wait_until(lambda: len(decode.resent) > 1)
    assert decode.ended == []
    decode.deaf_to_resend = 0
    assert posted.result().json()["choices"][0]["text"] == "abc"
    wait_until(lambda: decode.ended)


def test_tokens_that_never_come_end_the_request(
    decode: FakeDecodeNode, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_client, "RESEND_FOR_S", 0.3)
    decode.chunks, decode.lost, decode.deaf_to_resend = script(4), frozenset({1, 2}), 1000
    answer = http.post("/v1/completions", json=body(max_tokens=4))
    assert answer.status_code == 500
    assert "tokens 1 to 2 were lost on the way" in answer.json()["error"]["message"]
    wait_until(lambda: decode.cancelled)
    asked = len(decode.resent)
    decode.deaf_to_resend = 0
    decode.lost = frozenset()
    assert http.post("/v1/completions", json=body(max_tokens=4)).status_code == 200
    assert len(decode.resent) == asked, "nobody asks for them any more"


def test_what_a_node_has_given_up_is_not_waited_for(decode: FakeDecodeNode, http: httpx.Client) -> None:
    """It answers that it keeps nothing of the request."""
    decode.chunks, decode.lost = script(3), frozenset({1})
    decode._resend = lambda sender, asked: decode.send(  # type: ignore[method-assign]
        sender, Output(request_id=asked.request_id, start=0, finish_reason="abort")
    )
    answer = http.post("/v1/completions", json=body(max_tokens=3, stream=True))
    assert "the request was lost at its decode node" in answer.text
    assert len(decode.resent) == 1


def test_a_gateway_that_can_hear_nobody_any_more_ends(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its HTTP port would go on answering."""

    def broken() -> None:
        raise OSError("out of sockets")

    monkeypatch.setattr(gateway.gateway.control, "_send_due", broken)
    gateway.join()
    assert isinstance(gateway.error, ControlPlaneFailed)
