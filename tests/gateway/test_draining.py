"""Gateways that stop: what is in flight ends, at once or in its own time."""

import json
from collections.abc import Callable

import httpx
import pytest

from control.messages import Output, Token
from control.plane import ControlPlaneFailed
from tests.gateway.nodes import wait_until
from tests.gateway.world import RunningGateway, World


@pytest.mark.parametrize(
    ("fresh", "end"),
    [({}, RunningGateway.stop), ({"drain_timeout": 0.3}, RunningGateway.drain)],
    indirect=["fresh"],
    ids=["stopped", "at the drain timeout"],
)
def test_what_still_streams_at_the_end_is_cancelled(fresh: World, end: Callable[[RunningGateway], None]) -> None:
    fresh.decode.hold_after = 1
    with fresh.stream() as data:
        next(data)
        end(fresh.gateway)
        assert "shutting down" in next(data)
    fresh.gateway.join()
    assert len(fresh.decode.cancelled) == 1


def test_a_draining_gateway_lets_streams_finish_and_takes_no_more(fresh: World) -> None:
    fresh.decode.hold_after = 1
    with fresh.stream(max_tokens=3) as data:
        next(data)
        fresh.gateway.drain()
        with httpx.Client(base_url=fresh.gateway.url, timeout=20) as other:
            wait_until(lambda: other.get("/ready").status_code == 503)
            assert other.get("/ready").json()["reason"] == "draining"
            assert other.get("/health").status_code == 200
            answer = other.post("/v1/completions", json={"prompt": "abc"})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert answer.headers["Connection"] == "close"
        assert answer.json()["error"]["code"] == "draining"
        [asked] = fresh.decode.generated
        tokens = (Token(token_id=98), Token(token_id=99))
        rest = Output(request_id=asked.request_id, start=1, tokens=tokens, finish_reason="length")
        fresh.decode.send(rest)
        assert json.loads(next(data))["choices"][0]["text"] == "bc"
        assert list(data) == ["[DONE]"]
    fresh.gateway.join()
    assert fresh.decode.cancelled == []


def test_an_idle_gateway_drains_at_once(gateway: RunningGateway) -> None:
    gateway.drain()
    gateway.join()


def test_restarted_gateway_finds_the_nodes_again(fresh: World, start_gateway: Callable[..., RunningGateway]) -> None:
    fresh.gateway.stop()
    again = start_gateway(control_port=int(fresh.gateway.control_address.rpartition(":")[2]))
    wait_until(lambda: httpx.get(f"{again.url}/ready").status_code == 200)
    assert httpx.post(f"{again.url}/v1/completions", json={"prompt": "abc"}).status_code == 200


def test_a_gateway_that_can_hear_nobody_any_more_ends(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its HTTP port would go on answering."""

    def broken() -> None:
        raise OSError("out of sockets")

    monkeypatch.setattr(gateway.gateway.control, "_send_due", broken)
    gateway.join()
    assert isinstance(gateway.error, ControlPlaneFailed)
