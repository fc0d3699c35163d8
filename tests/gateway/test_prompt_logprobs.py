"""Log probabilities of prompts, as vLLM's and OpenAI's clients get them."""

from typing import Any

import httpx
import pytest

from control.prompt_logprobs import MAX_PROMPT_LOGPROBS
from tests.gateway.nodes import FakeDecodeNode
from tests.gateway.world import BOS, World, chunks_of


def complete(http: httpx.Client, **fields: Any) -> Any:
    answer = http.post("/v1/completions", json={"max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_prompt_logprobs_are_by_position_and_token(fresh: World) -> None:
    [first, second] = complete(fresh.http, prompt=["abc", "x"], prompt_logprobs=2)
    assert first["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
            "1": {"logprob": -1.5, "rank": 1, "decoded_token": "\x01"},
            "2": {"logprob": -2.5, "rank": 2, "decoded_token": "\x02"},
        },
        {
            "99": {"logprob": -2.0, "rank": 2, "decoded_token": "c"},
            "2": {"logprob": -2.5, "rank": 1, "decoded_token": "\x02"},
            "3": {"logprob": -3.5, "rank": 2, "decoded_token": "\x03"},
        },
    ]
    assert second["prompt_logprobs"] == [None], "nothing says how likely the first token is"
    assert [choice["logprobs"] for choice in (first, second)] == [None, None]
    assert {generate.prompt_logprobs for generate in fresh.decode.generated} == {2}


def test_of_a_chat_they_are_those_of_the_conversation(fresh: World) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "n": 2, "prompt_logprobs": 0}
    answer = fresh.http.post("/v1/chat/completions", json=body).json()
    prompt = fresh.decode.generated[0].prompt_ids
    assert [position and list(position) for position in answer["prompt_logprobs"]] == [
        None,
        *([str(token_id)] for token_id in prompt[1:]),
    ]
    assert "prompt_logprobs" not in answer["choices"][0]


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}])
def test_choices_of_one_prompt_share_those_of_the_first(fresh: World, fields: dict[str, Any]) -> None:
    choices = complete(fresh.http, prompt=["abc", "xy"], n=3, **fields)
    alone = [complete(fresh.http, prompt=prompt, **fields)[0] for prompt in ("abc", "xy")]
    for choice in choices:
        expected = alone[choice["index"] // 3]
        assert choice.get("prompt_logprobs") == expected.get("prompt_logprobs")
        assert choice["logprobs"] == expected["logprobs"]
    asked = sorted((one.group, one.request_id, one.prompt_logprobs) for one in fresh.decode.generated[:6])
    assert [count for _, _, count in asked] == [1, None, None] * 2
    assert len({group for group, _, _ in asked}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_has_those_of_the_prompt_in_front(fresh: World, stream: bool) -> None:
    fresh.decode.chunks = [list("é!".encode()), [100]]
    answer = fresh.complete(prompt="aéb", echo=True, logprobs=1, n=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else answer.choices
    for index in (0, 1):
        own = [choice for choice in choices if choice.index == index]
        parts = [choice.logprobs for choice in own if choice.logprobs]
        assert "".join(choice.text for choice in own) == "aébé!d"
        assert [p for part in parts for p in part.token_logprobs] == [None, -1.0, -2.0, -3.0, *[-0.5] * 4]
        assert [offset for part in parts for offset in part.text_offset] == [0, 1, 1, 2, 3, 3, 4, 5]
        assert [token for part in parts for token in part.tokens][-2:] == ["!", "d"]
        first, second, *_ = [top for part in parts for top in part.top_logprobs]
        assert (first, second) == (None, {"\x01": -1.5, "�": -1.0})


def test_a_stream_of_a_choice_begins_with_those_of_its_prompt(fresh: World) -> None:
    body = {"prompt": ["abc", "xy"], "max_tokens": 3, "echo": True, "logprobs": 0, "n": 3, "stream": True}

    def said() -> list[tuple[str, list[float | None]]]:
        parts = [part for chunk in chunks_of(fresh.post(**body)) for part in chunk["choices"]]
        own = [[part for part in parts if part["index"] == index] for index in range(6)]
        return [
            ("".join(part["text"] for part in parts), [p for part in parts for p in part["logprobs"]["token_logprobs"]])
            for parts in own
        ]

    expected = [("abcabc", [None, -1.0, -2.0, *[-0.5] * 3])] * 3 + [("xyxyx", [None, -1.0, *[-0.5] * 3])] * 3
    assert said() == expected
    asked = sorted((one.group, one.request_id, one.prompt_logprobs) for one in fresh.decode.generated)
    assert [count for _, _, count in asked] == [0, None, None] * 2
    assert len({group for group, _, _ in asked}) == 2
    # The other choices' tokens are there before those that the first ones have to ask for again.
    fresh.decode.lost_prompt = 2
    assert said() == expected
    assert len(fresh.decode.resent) >= 2


def test_an_echo_of_no_tokens_is_the_prompt(fresh: World) -> None:
    body = {"prompt": [BOS, 97, 98], "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
    answer = fresh.http.post("/v1/completions", json=body).json()
    [choice] = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("<bos>ab", "length")
    assert choice["logprobs"] == {
        "tokens": ["<bos>", "a", "b"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"a": -1.0}, {"b": -2.0}],
        "text_offset": [0, 5, 6],
    }
    assert answer["usage"]["completion_tokens"] == 0
    assert fresh.decode.generated[0].max_new_tokens == 1, "a decode node generates at least one"
    [plain] = complete(fresh.http, prompt="ab", max_tokens=0, echo=True)
    assert (plain["text"], plain["logprobs"]) == ("ab", None)
    assert fresh.decode.generated[1].prompt_logprobs is None
    [cut] = complete(fresh.http, prompt="abcd", max_tokens=0, echo=True, logprobs=0, truncate_prompt_tokens=2)
    assert (cut["text"], cut["logprobs"]["tokens"], cut["logprobs"]["text_offset"]) == ("cd", ["c", "d"], [0, 1])


@pytest.mark.parametrize("lost", [1, 3])
def test_those_that_were_lost_are_asked_for_again(fresh: World, lost: int) -> None:
    fresh.decode.lost_prompt = lost
    [choice] = complete(fresh.http, prompt="abcdef", max_tokens=3, prompt_logprobs=0)
    assert choice["text"] == "abc"
    assert [p["logprob"] for position in choice["prompt_logprobs"][1:] for p in position.values()] == [
        -1.0, -2.0, -3.0, -4.0, -5.0
    ]  # fmt: skip
    assert {asked.start for asked in fresh.decode.resent} == {0}


def test_those_of_another_shape_than_was_asked_for_are_an_error(fresh: World, monkeypatch: pytest.MonkeyPatch) -> None:
    made = FakeDecodeNode._prompt_logprobs
    monkeypatch.setattr(fresh.decode, "_prompt_logprobs", lambda r: made(r.model_copy(update={"prompt_logprobs": 7})))
    answer = fresh.http.post("/v1/completions", json={"prompt": "ab", "prompt_logprobs": 1})
    assert answer.status_code == 500


@pytest.mark.parametrize(
    ("body", "field"),
    [({"prompt_logprobs": 20, "n": 100}, "prompt_logprobs"), ({"echo": True, "logprobs": 20, "n": 100}, "echo")],
)
def test_too_many_are_refused(fresh: World, body: dict[str, Any], field: str) -> None:
    answer = fresh.http.post("/v1/completions", json={"prompt": "a" * 300, "max_tokens": 1, **body})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], str(MAX_PROMPT_LOGPROBS) in error["message"]) == (field, True)
