"""Whose requests may go before others."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gateway.requests.generation import MAX_PRIORITY
from tests.gateway.nodes import FakeDecodeNode
from tests.gateway.test_access import key_file, refused
from tests.gateway.world import RunningGateway

BODY = {"prompt": "abc", "max_tokens": 2}
Start = Callable[..., RunningGateway]


def posted(gateway: RunningGateway, priority: int, key: str = "none", path: str = "/v1/completions") -> httpx.Response:
    body = {
        "/v1/completions": BODY,
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/v1/responses": {"input": "a", "max_output_tokens": 16},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    }[path]
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(gateway.url + path, json={**body, "priority": priority}, headers=headers)


@pytest.fixture
def keyed(start_gateway: Start, tmp_path: Path) -> RunningGateway:
    """A gateway whose key `first` may go first, and `other` may not."""
    return start_gateway(api_keys=("other",), priority_key_file=key_file(tmp_path, "first\n"))


@pytest.fixture
def gateway(request: pytest.FixtureRequest) -> RunningGateway:
    return request.getfixturevalue(getattr(request, "param", "keyed"))


@pytest.fixture
def anyone(start_gateway: Start) -> RunningGateway:
    return start_gateway(allow_priority=True)


@pytest.fixture
def nobody(start_gateway: Start) -> RunningGateway:
    return start_gateway()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_key_goes_first_only_if_it_is_allowed_to(gateway: RunningGateway, decode: FakeDecodeNode, path: str) -> None:
    answer = posted(gateway, -1, "other", path)
    assert answer.status_code == 403
    assert "priority: expected 0 or more, found -1" in answer.json()["error"]["message"]
    assert "--priority-key-file" in answer.json()["error"]["message"]
    assert refused(gateway, "priority") == 1
    assert decode.generated == []
    for key, priority in (("other", 0), ("other", MAX_PRIORITY), ("first", -MAX_PRIORITY), ("first", 5)):
        assert posted(gateway, priority, key, path).status_code == 200
        assert decode.generated[-1].priority == priority


@pytest.mark.parametrize("gateway", ["nobody"], indirect=True)
def test_without_keys_nobody_goes_first(gateway: RunningGateway, decode: FakeDecodeNode) -> None:
    assert posted(gateway, -1).json()["error"]["param"] == "priority"
    assert posted(gateway, 1).status_code == 200


@pytest.mark.parametrize("gateway", ["anyone"], indirect=True)
def test_all_clients_go_first_where_the_operator_says_so(gateway: RunningGateway, decode: FakeDecodeNode) -> None:
    assert posted(gateway, -1).status_code == 200


@pytest.mark.parametrize("priority", [-(2**63), -MAX_PRIORITY - 1, MAX_PRIORITY + 1])
def test_a_priority_is_bounded(gateway: RunningGateway, decode: FakeDecodeNode, priority: int) -> None:
    answer = posted(gateway, priority, "first")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    assert str(MAX_PRIORITY) in answer.json()["error"]["message"]


def test_the_permission_is_taken_back_without_a_restart(
    gateway: RunningGateway, decode: FakeDecodeNode, tmp_path: Path, look_often: None
) -> None:
    key_file(tmp_path, "another\n")
    assert posted(gateway, -1, "first").status_code == 401
    assert posted(gateway, -1, "another").status_code == 200
