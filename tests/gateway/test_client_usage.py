"""What the clients of a key may use, and what is said of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from base.metrics import Metrics
from gateway.client_usage import ClientUsage
from gateway.errors import ApiError
from gateway.keys import Client
from tests.gateway.nodes import wait_until
from tests.gateway.test_access import key_file
from tests.gateway.world import World


@pytest.fixture
def keyed(start_world: Callable[..., World], tmp_path: Path) -> World:
    keys = (
        "sk-one name=search max-concurrent-requests=1\nsk-new name=search max-concurrent-requests=1\n"
        "sk-few name=few tokens-per-minute=60\nsk-any name=any\n"
    )
    return start_world(api_key_file=key_file(tmp_path, keys))


def post(world: World, key: str, **fields: object) -> httpx.Response:
    body = {"prompt": "abc", "max_tokens": 4, **fields}
    return world.http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def test_requests_at_a_time_are_bounded_for_each_name(keyed: World) -> None:
    keyed.decode.hold_after = 1
    body = {"prompt": "abc", "max_tokens": 4, "stream": True}
    headers = {"Authorization": "Bearer sk-one"}
    with keyed.http.stream("POST", "/v1/completions", json=body, headers=headers) as held:
        lines = held.iter_lines()
        next(lines)
        for key in ("sk-one", "sk-new"):
            refused = post(keyed, key)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            error = refused.json()["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert error["message"] == "this key has 1 requests at a time, its limit; try again later"
        keyed.decode.hold_after = None
        assert post(keyed, "sk-any").status_code == 200, "another's limit is another's"
    wait_until(lambda: keyed.gateway.serving == 0)
    assert post(keyed, "sk-new").status_code == 200


def test_tokens_per_minute_are_bounded_and_counted(keyed: World) -> None:
    keyed.decode.cached_tokens = (2,)
    assert post(keyed, "sk-few", max_tokens=90).status_code == 200, "as many as one request takes"
    refused = post(keyed, "sk-few")
    assert refused.status_code == 429
    assert 30 <= int(refused.headers["retry-after"]) <= 35, "33 overdrawn, of 1 a second"
    assert "used its 60 tokens per minute" in refused.json()["error"]["message"]
    assert post(keyed, "sk-any").status_code == 200
    metrics = keyed.metrics()
    for kind, tokens in (("prompt", 3), ("cached", 2), ("generated", 90)):
        assert f'hisparse_pd_client_tokens_total{{client="few",kind="{kind}"}} {tokens}.0' in metrics
    assert 'hisparse_pd_client_requests_total{client="few"} 1.0' in metrics
    assert 'hisparse_pd_http_refused_total{reason="client_tokens"} 1.0' in metrics


def test_a_request_that_nobody_can_serve_uses_no_tokens(keyed: World) -> None:
    keyed.leaves(keyed.decode)
    assert [post(keyed, "sk-few", prompt="a" * 50).status_code for _ in range(3)] == [503] * 3
    assert 'hisparse_pd_client_tokens_total{client="few",kind="prompt"}' not in keyed.metrics()


def test_an_overdrawn_key_waits_until_a_minute_has_filled_it() -> None:
    usage, client = ClientUsage(Metrics()), Client(b"k", "few", tokens_per_minute=60)
    usage.begin(client, 0.0)
    usage.add(client, "prompt", 90, 0.0)
    with pytest.raises(ApiError) as refused:
        usage.begin(client, 10.0)
    assert refused.value.retry_after == pytest.approx(21.0)
    usage.begin(client, 31.0)
    usage.add(client, "prompt", 60, 1000.0)
    with pytest.raises(ApiError):
        usage.begin(client, 1000.0)


def test_tokens_count_while_the_key_has_a_limit_of_them() -> None:
    """Keys of one name share an account, and the settings of a key change while the gateway runs."""
    usage, without = ClientUsage(Metrics()), Client(b"k", "search", max_concurrent_requests=8)
    limited = replace(without, tokens_per_minute=60)
    usage.begin(without, 0.0)
    usage.add(without, "prompt", 1_000_000, 0.0)
    usage.begin(limited, 1.0)
    usage.add(limited, "prompt", 59, 1.0)
    usage.begin(without, 1.0)
    usage.begin(limited, 1.0)
    usage.add(limited, "prompt", 1, 1.0)
    with pytest.raises(ApiError):
        usage.begin(limited, 1.0)
