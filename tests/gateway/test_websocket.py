"""/v1/responses over WebSockets: the events of HTTP, turns of one conversation, and what one client may take."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from control.messages import Output, Token
from gateway import websocket
from tests.gateway.nodes import wait_until
from tests.gateway.test_access import key_file, refused
from tests.gateway.test_access_log import answered
from tests.gateway.world import MODEL, World, events_of, glm_call
from tests.service.test_websocket import RESET, TEXT, closed, frame

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}}
START = Callable[..., World]


class Socket:
    """A client's connection."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def ask(self, **fields: Any) -> None:
        self.connection.send(json.dumps({"type": "response.create", "model": MODEL, **fields}))

    def event(self) -> dict[str, Any]:
        event: dict[str, Any] = json.loads(self.connection.recv(timeout=10))
        return event

    def answer(self) -> list[dict[str, Any]]:
        """The events of the next response, or an error."""
        events = [self.event()]
        while events[-1]["type"] not in ("error", "response.completed", "response.incomplete", "response.failed"):
            events.append(self.event())
        return events

    def turn(self, **fields: Any) -> list[dict[str, Any]]:
        self.ask(**fields)
        return self.answer()

    def response(self, **fields: Any) -> dict[str, Any]:
        """The response at the end of a turn."""
        response: dict[str, Any] = self.turn(**fields)[-1]["response"]
        return response

    def error(self, **fields: Any) -> tuple[int, str]:
        """The status and the code of a turn that is refused."""
        event = self.turn(**fields)[-1]
        assert event["type"] == "error", event
        return event["status"], event["error"]["code"]

    def closed(self) -> int:
        """The code with which the gateway closes the connection."""
        return closed(self.connection)


@contextmanager
def opened(world: World, path: str = "/v1/responses", **options: Any) -> Iterator[Socket]:
    url = world.gateway.url.replace("http", "ws", 1) + path
    with connect(url, proxy=None, max_size=None, **options) as connection:
        yield Socket(connection)


def without_names(value: Any) -> Any:
    """Events without what differs each time."""
    if isinstance(value, dict):
        return {
            name: without_names(inner)
            for name, inner in value.items()
            if name not in ("id", "item_id", "call_id", "created_at", "completed_at")
        }
    return [without_names(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("fields", [{}, {"tools": [TOOL]}, {"top_logprobs": 2}, {"max_output_tokens": 3}])
def test_events_are_those_of_the_http_stream(glm: World, fields: dict[str, Any]) -> None:
    glm.says(f"Rome, then.</think>I look, ü.\n\n{glm_call('Rome')}")
    body = {"model": MODEL, "input": "How is it?", **fields}
    streamed = events_of(glm.http.post("/v1/responses", json={**body, "stream": True}))
    with opened(glm) as socket:
        sent = socket.turn(**body)

    def joined(events: list[dict[str, Any]]) -> list[Any]:
        """With deltas that follow each other as one: nodes' messages are rendered as they come."""
        found: list[Any] = []
        for event in without_names(events):
            event.pop("sequence_number")
            if found and event["type"].endswith(".delta") and found[-1]["type"] == event["type"]:
                found[-1]["delta"] += event["delta"]
                found[-1]["logprobs"] = found[-1].get("logprobs", []) + event.get("logprobs", [])
            else:
                found.append(event)
        return found

    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    assert joined(sent) == joined(streamed)


def test_turns_continue_the_conversation_of_their_connection(glm: World) -> None:
    glm.says(f"Hm.</think>I look.\n{glm_call('Rome')}")
    with opened(glm) as socket:
        first = socket.response(input="How is it in Rome?", tools=[TOOL])
        call = next(item for item in first["output"] if item["type"] == "function_call")
        glm.says("Hm.</think>Sunny.")
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        second = socket.response(input=[output], previous_response_id=first["id"])
        assert "How is it in Rome?<|assistant|>I look." in glm.prompt
        assert "<tool_call>weather" in glm.prompt
        assert glm.prompt.endswith("<|tool|>sun<|assistant|><think>")
        third = socket.response(input="And now?", previous_response_id=second["id"])
    assert third["status"] == "completed"
    assert glm.prompt.endswith("<|tool|>sun<|assistant|>Sunny.<|user|>And now?<|assistant|><think>")


def test_openai_client_continues_over_a_websocket(glm: World) -> None:
    glm.says("</think>Paris.")
    with glm.client.responses.connect() as connection:
        ids: list[str | None] = [None]
        for question in ("Capital?", "Sure?"):
            connection.response.create(model=MODEL, input=question, previous_response_id=ids[-1])
            for event in connection:
                if event.type == "response.completed":
                    assert event.response.output_text == "Paris."
                    ids.append(event.response.id)
                    break
    assert glm.prompt.startswith("<|user|>Capital?<|assistant|>Paris.<|user|>Sure?")


def test_only_the_last_response_of_a_connection_is_found(glm: World) -> None:
    glm.says("</think>ok")
    missing = (400, "previous_response_not_found")
    with opened(glm) as socket:
        first = socket.response(input="a")["id"]
        second = socket.response(input="b", previous_response_id=first)["id"]
        assert socket.error(input="c", previous_response_id=first) == missing
        assert socket.response(input="c", previous_response_id=second)["status"] == "completed"
        assert socket.error(input="d", previous_response_id="resp_0") == missing
    with opened(glm) as other:
        assert other.error(input="d", previous_response_id=second) == missing
        assert other.response(input="d")["status"] == "completed"


def test_a_turn_that_fails_forgets_what_it_continues(glm: World) -> None:
    glm.says("</think>ok")
    orphan = {"type": "function_call_output", "call_id": "call_1", "output": "x"}
    with opened(glm) as socket:
        first = socket.response(input="a")["id"]
        assert socket.error(input=[]) == (400, "invalid_request_error")
        second = socket.response(input="b", previous_response_id=first)["id"]
        assert socket.error(input=[orphan], previous_response_id=second) == (400, "invalid_request_error")
        assert socket.error(input="c", previous_response_id=second) == (400, "previous_response_not_found")
        third = socket.response(input="a")["id"]
        glm.breaks_after("</think>no")
        assert socket.response(input="b", previous_response_id=third)["status"] == "failed"
        assert socket.error(input="c", previous_response_id=third) == (400, "previous_response_not_found")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("garbage", None),
        (b"\xff\xfe", None),
        ('{"type": "response.create", "input": ', None),
        ("[]", None),
        ('{"type": "response.cancel"}', "type"),
        ('{"input": "a"}', "type"),
        ('{"type": "response.create", "input": "a", "stream": false}', "stream"),
        ('{"type": "response.create", "input": "a", "background": true}', "background"),
        ('{"type": "response.create", "input": "a", "generate": false}', "generate"),
        ('{"type": "response.create", "input": [{"type": "web_search_call"}]}', "input.0"),
        ('{"type": "response.create", "input": "a", "tools": [{"type": "function", "name": 3}]}', "tools.0.name"),
        ('{"type": "response.create", "input": "a", "metadata": {"a": 123456789012345678901234}}', "metadata.a"),
        ('{"type": "response.create", "input": "a", "temperature": 1e999}', "temperature"),
        (
            '{"type": "response.create", "input": "a", "tools": [{"type": "function", "name": "a", "parameters": '
            '{"const": NaN}}]}',
            "tools.0.parameters",
        ),
    ],
)
def test_a_message_that_is_wrong_costs_its_turn_alone(glm: World, message: str | bytes, param: str | None) -> None:
    glm.says("</think>ok")
    with opened(glm) as socket:
        socket.connection.send(message)
        event = socket.event()
        assert (event["type"], event["status"], event["error"]["param"]) == ("error", 400, param)
        assert socket.response(input="a")["status"] == "completed"


def test_messages_that_wait_are_answered_one_after_the_other(glm: World) -> None:
    glm.says("</think>ok")
    with opened(glm) as socket:
        for number in range(8):
            socket.ask(input=str(number))
        answers = [socket.answer() for _ in range(8)]
    assert len({events[-1]["response"]["id"] for events in answers}) == 8
    assert all({event["response"]["id"] for event in events if "response" in event} for events in answers)


def test_a_client_with_too_many_messages_waiting_is_left(fresh: World) -> None:
    fresh.decode.hold_after = 1
    with opened(fresh) as socket:
        socket.ask(input="a")
        assert socket.event()["type"] == "response.created"
        socket.connection.socket.sendall(frame(TEXT, b"{}") * 100)
        assert socket.closed() == 1008
    wait_until(lambda: fresh.decode.cancelled)
    assert refused(fresh.gateway, "too_many_messages") == 1
    wait_until(lambda: not (fresh.gateway.serving or fresh.gateway.gateway._admission.held))


def test_a_client_that_leaves_in_the_middle_stops_its_request(fresh: World) -> None:
    fresh.decode.hold_after = 1
    with opened(fresh) as socket:
        socket.ask(input="a")
        while socket.event()["type"] != "response.output_text.delta":
            pass
        assert fresh.decode.cancelled == []
    wait_until(lambda: fresh.decode.cancelled)
    wait_until(lambda: not fresh.gateway.serving and not fresh.gateway.connections)


@pytest.mark.parametrize("fresh", [{"max_body_mib": 1, "header_timeout": 0.5}], indirect=True)
def test_a_message_that_is_too_large_or_too_slow_ends_the_connection(fresh: World) -> None:
    with opened(fresh) as socket:
        with suppress(ConnectionClosed):
            socket.ask(input="x" * (1 << 20))
        assert socket.closed() in (1009, RESET)
    assert refused(fresh.gateway, "body_too_large") == 1
    with opened(fresh) as socket:
        socket.connection.socket.sendall(b"\x81\xff" + (1 << 19).to_bytes(8, "big") + b"\0\0\0\0" + b"{" * 100)
        assert socket.closed() == 1008
    assert refused(fresh.gateway, "body_timeout") == 1
    assert fresh.gateway.gateway._admission.held == 0


@pytest.mark.parametrize("fresh", [{"max_body_mib": 1, "max_total_body_mib": 1}], indirect=True)
def test_messages_that_arrive_count_as_bodies_do(fresh: World) -> None:
    head = b"\x81\xff" + (1 << 20).to_bytes(8, "big") + b"\0\0\0\0"
    with opened(fresh, close_timeout=0.1) as first:
        first.connection.socket.sendall(head + b"{" * (900 << 10))
        wait_until(lambda: fresh.gateway.gateway._admission.held > 800 << 10)
        with opened(fresh) as second:
            with suppress(ConnectionError):
                second.connection.socket.sendall(head + b"{" * (200 << 10))
            assert second.closed() in (1013, RESET)
        assert fresh.post(prompt="x" * (200 << 10)).status_code == 429
        assert refused(fresh.gateway, "too_many_bytes") >= 2
    wait_until(lambda: fresh.gateway.gateway._admission.held == 0)


@pytest.mark.parametrize("fresh", [{"max_body_mib": 1}], indirect=True)
def test_a_conversation_that_outgrows_a_body_is_refused(fresh: World) -> None:
    with opened(fresh) as socket:
        item = {"role": "user", "content": "a", "padding": "x" * (900 << 10)}
        first = socket.response(input=[item], max_output_tokens=1)["id"]
        assert socket.error(input=[item], previous_response_id=first) == (413, "request_too_large")
        assert socket.error(input="a", previous_response_id=first) == (400, "previous_response_not_found")


@pytest.mark.parametrize("fresh", [{"max_body_mib": 1, "max_total_body_mib": 1}], indirect=True)
def test_of_kept_conversations_that_are_too_many_the_largest_is_forgotten(fresh: World) -> None:
    def item(size: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "a", "padding": "x" * (size << 10)}]

    with opened(fresh) as large, opened(fresh) as small:
        forgotten = large.response(input=item(600), max_output_tokens=1)["id"]
        # Its message counts until the turn has ended, which the client is not told.
        wait_until(lambda: fresh.gateway.gateway._admission.held == 0)
        kept = small.response(input=item(500), max_output_tokens=1)["id"]
        wait_until(lambda: 'conversations_forgotten_total{reason="too_many_bytes"} 1.0' in fresh.metrics())
        assert large.error(input="b", previous_response_id=forgotten) == (400, "previous_response_not_found")
        assert small.response(input="b", previous_response_id=kept, max_output_tokens=1)["status"] == "incomplete"
    wait_until(lambda: fresh.gateway.gateway._conversations.held == 0)


def test_a_websocket_needs_a_key_and_its_turns_have_the_limits_of_it(start_world: START, tmp_path: Path) -> None:
    keys = key_file(tmp_path, "sk-a name=search max-concurrent-requests=1\nsk-b\n")
    world = start_world(api_key_file=keys)
    with pytest.raises(InvalidStatus) as error, opened(world):
        pass
    assert (error.value.response.status_code, refused(world.gateway, "api_key")) == (401, 1)
    world.decode.hold_after = 1
    key = {"Authorization": "Bearer sk-a"}
    with opened(world, additional_headers=key) as first, opened(world, additional_headers=key) as second:
        first.ask(input="a")
        assert first.event()["type"] == "response.created"
        assert second.error(input="b") == (429, "rate_limit_exceeded")
    assert refused(world.gateway, "client_requests") == 1


def test_web_pages_of_other_origins_open_no_websocket(fresh: World) -> None:
    own = fresh.gateway.url
    with opened(fresh, origin=own) as socket:
        assert socket.response(input="a", max_output_tokens=1)["status"] == "incomplete"
    with pytest.raises(InvalidStatus) as error, opened(fresh, origin="https://other.example"):
        pass
    assert (error.value.response.status_code, refused(fresh.gateway, "origin")) == (403, 1)


def test_only_responses_have_a_websocket_and_only_a_get_opens_it(fresh: World) -> None:
    for path in ("/v1/completions", "/health", "/v1/responses/input_tokens"):
        with pytest.raises(InvalidStatus) as error, opened(fresh, path):
            pass
        assert error.value.response.status_code == 403
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    body = {"input": "a", "max_output_tokens": 1}
    assert fresh.http.post("/v1/responses", json=body, headers=upgrade).status_code == 200
    with httpx.Client(base_url=fresh.gateway.url) as http:
        assert http.get("/v1/responses", headers=upgrade).status_code == 400
        assert http.get("/v1/responses", headers={**upgrade, "X": "x" * 9000}).status_code == 431


def test_each_turn_has_a_line_in_the_log_and_the_connection_one(fresh: World) -> None:
    with capture_logs() as lines:
        with opened(fresh, additional_headers={"X-Request-Id": "mine"}) as socket:
            socket.response(input="a", max_output_tokens=2)
            socket.error(input=[])
        found = answered(lines, 3)
    assert [(line["http_request_id"], line["status"]) for line in found] == [
        ("mine-1", 200),
        ("mine-2", 400),
        ("mine", 101),
    ]
    assert {line["endpoint"] for line in found} == {"/v1/responses"}
    assert found[0]["tokens"] == 2


def test_a_draining_gateway_ends_turns_and_closes_websockets(fresh: World) -> None:
    fresh.decode.hold_after = 1
    with opened(fresh) as busy, opened(fresh) as idle, opened(fresh) as silent:
        busy.ask(input="a", max_output_tokens=2)
        wait_until(lambda: fresh.decode.generated)
        fresh.gateway.drain()
        wait_until(lambda: fresh.http.get("/ready").status_code == 503)
        assert idle.error(input="b") == (503, "draining")
        assert idle.closed() == 1012
        [asked] = fresh.decode.generated
        rest = Output(request_id=asked.request_id, start=1, tokens=(Token(token_id=98),), finish_reason="length")
        fresh.decode.send(rest)
        assert busy.answer()[-1]["response"]["usage"]["output_tokens"] == 2
        assert (busy.closed(), silent.closed()) == (1012, 1012)
    fresh.gateway.join()
    assert fresh.decode.cancelled == []


def test_a_connection_ends_when_it_is_old_but_not_within_a_turn(fresh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "MAX_AGE_S", 0.0)
    with opened(fresh) as socket:
        [event] = socket.answer()
        assert event["error"]["code"] == "websocket_connection_limit_reached"
        assert socket.closed() == 1000


@pytest.mark.parametrize("fresh", [{"max_concurrent_requests": 2}], indirect=True)
def test_the_client_with_most_websockets_loses_an_idle_one(fresh: World) -> None:
    one, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "other"))
    with (
        opened(fresh, additional_headers=other) as kept,
        opened(fresh, additional_headers=one) as oldest,
        opened(fresh, additional_headers=one) as newest,
    ):
        assert oldest.closed() == 1013
        for socket in (kept, newest):
            assert socket.response(input="a", max_output_tokens=1)["status"] == "incomplete"
    assert refused(fresh.gateway, "too_many_websockets") == 1
