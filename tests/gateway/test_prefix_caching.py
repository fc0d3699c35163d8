"""What the gateway says of cached tokens, and how it keeps the caches of clients apart."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.gateway.world import MODEL, World, chunks_of, events_of

CHAT = [{"role": "user", "content": "How is it in Rome?"}]


def posted(world: World, path: str, **fields: Any) -> Any:
    answer = world.http.post(path, json={"model": MODEL, "max_tokens": 2, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_cached_tokens_of_every_api(fresh: World) -> None:
    fresh.decode.cached_tokens = (7,)
    for path, fields in (("/v1/completions", {"prompt": "0123456789"}), ("/v1/chat/completions", {"messages": CHAT})):
        assert posted(fresh, path, **fields)["usage"]["prompt_tokens_details"] == {"cached_tokens": 7}
    usage = posted(fresh, "/v1/messages", messages=CHAT)["usage"]
    prompt_tokens = len(fresh.decode.generated[-1].prompt_ids)
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt_tokens - 7, 7)
    answer = fresh.http.post("/v1/responses", json={"model": MODEL, "input": "Rome?", "max_output_tokens": 16}).json()
    assert answer["usage"]["input_tokens_details"]["cached_tokens"] == 7


def test_cached_tokens_of_a_stream(fresh: World) -> None:
    """Also where a stop string ends it before the node has said its last word."""
    fresh.decode.cached_tokens = (5,)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "abcdef", "max_tokens": 6, "stream": True, "stream_options": options, "stop": ["c"]}
    chunks = chunks_of(fresh.http.post("/v1/completions", json=body))
    assert len(chunks) > 2
    assert all(chunk["usage"]["prompt_tokens_details"] == {"cached_tokens": 5} for chunk in chunks)
    body = {"messages": CHAT, "max_tokens": 6, "stream": True, "model": MODEL}
    begin, *_ = events_of(fresh.http.post("/v1/messages", json=body))
    assert begin["message"]["usage"]["cache_read_input_tokens"] == 5


def test_a_prompt_of_many_answers_counts_once_as_computed(fresh: World) -> None:
    fresh.decode.cached_tokens = (0, 3, 2, 4)
    usage = posted(fresh, "/v1/completions", prompt=["abcd", "efgh"], n=2)["usage"]
    cached = dict(
        zip((sent.request_id[-1] for sent in fresh.decode.generated), fresh.decode.cached_tokens, strict=True)
    )
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 8)
    expected = min(cached["0"], cached["1"]) + min(cached["2"], cached["3"])
    assert usage["prompt_tokens_details"]["cached_tokens"] == expected


@pytest.mark.parametrize("per_key", [False, True])
def test_salts_keep_clients_apart(start_world: Callable[..., World], per_key: bool) -> None:
    world = start_world(prefix_cache_per_key=per_key, api_keys=("one", "two"))

    def salt(headers: dict[str, str], **fields: object) -> str:
        answer = world.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **fields}, headers=headers)
        assert answer.status_code == 200, answer.text
        return world.decode.generated[-1].cache_salt

    one, two = {"Authorization": "Bearer one"}, {"Authorization": "Bearer two"}
    plain = salt(one)
    assert (plain == "") is not per_key
    assert (salt(two) == plain) is not per_key
    assert salt({"x-api-key": "one"}) == plain, "the same key"
    assert salt(one | {"x-api-key": "two"}) == plain, "the key that was accepted"
    salted = salt(one, cache_salt="mine")
    assert salted not in (plain, salt(one, cache_salt="other"))
    assert (salt(two, cache_salt="mine") == salted) is not per_key
    assert "mine" not in salted
    assert "one" not in salted
    assert len(salted) <= 128


def test_an_empty_salt_is_refused_and_every_api_takes_one(fresh: World) -> None:
    assert fresh.http.post("/v1/completions", json={"prompt": "a", "cache_salt": ""}).status_code == 400
    posted(fresh, "/v1/messages", messages=CHAT, cache_salt="mine")
    first = fresh.decode.generated[-1].cache_salt
    posted(fresh, "/v1/chat/completions", messages=CHAT, cache_salt="mine")
    assert fresh.decode.generated[-1].cache_salt == first != ""
