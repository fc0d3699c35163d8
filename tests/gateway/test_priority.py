"""Whose requests may go before others."""

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from gateway.requests.generation import MAX_PRIORITY
from tests.gateway.test_access import key_file, refused
from tests.gateway.world import ENDPOINTS, World


def posted(world: World, priority: int, key: str = "none", path: str = "/v1/completions") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return world.http.post(path, json={**ENDPOINTS[path], "priority": priority}, headers=headers)


@pytest.fixture
def keyed(start_world: Callable[..., World], tmp_path: Path) -> World:
    """Its key `first` may go first, and `other` may not."""
    return start_world(api_keys=("other",), priority_key_file=key_file(tmp_path, "first\n"))


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_key_goes_first_only_if_it_is_allowed_to(keyed: World, path: str) -> None:
    answer = posted(keyed, -1, "other", path)
    assert answer.status_code == 403
    assert "priority: expected 0 or more, found -1" in answer.json()["error"]["message"]
    assert "--priority-key-file" in answer.json()["error"]["message"]
    assert refused(keyed.gateway, "priority") == 1
    assert keyed.decode.generated == []
    for key, priority in (("other", 0), ("other", MAX_PRIORITY), ("first", -MAX_PRIORITY), ("first", 5)):
        assert posted(keyed, priority, key, path).status_code == 200
        assert keyed.decode.generated[-1].priority == priority


def test_without_keys_nobody_goes_first(fresh: World) -> None:
    assert posted(fresh, -1).json()["error"]["param"] == "priority"
    assert posted(fresh, 1).status_code == 200


@pytest.mark.parametrize("fresh", [{"allow_priority": True}], indirect=True)
def test_all_clients_go_first_where_the_operator_says_so(fresh: World) -> None:
    assert posted(fresh, -1).status_code == 200


@pytest.mark.parametrize("priority", [-(2**63), -MAX_PRIORITY - 1, MAX_PRIORITY + 1])
def test_a_priority_is_bounded(keyed: World, priority: int) -> None:
    answer = posted(keyed, priority, "first")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    assert str(MAX_PRIORITY) in answer.json()["error"]["message"]


def test_the_permission_is_taken_back_without_a_restart(keyed: World, tmp_path: Path, look_often: None) -> None:
    key_file(tmp_path, "another\n")
    assert posted(keyed, -1, "first").status_code == 401
    assert posted(keyed, -1, "another").status_code == 200
