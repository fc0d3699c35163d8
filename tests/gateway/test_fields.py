"""Fields of requests that say how an answer is drawn, how many there are, and what its text has in it."""

import re
from typing import Any

import pytest
from structlog.testing import capture_logs

from control.messages import Sampling
from gateway.errors import ApiError
from gateway.requests.body import FieldPolicy
from tests.docs.tables import BODIES, CELLS, readme_rows
from tests.gateway.nodes import CONTEXT, wait_until
from tests.gateway.world import EOS, MODEL, World, chunks_of


@pytest.fixture(autouse=True)
def _reset(world: World) -> None:
    world.decode.reset()


def test_how_tokens_are_drawn_is_told_to_the_decode_node(world: World) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 9,
        "temperature": 0.5,
        "seed": 3,
        "min_p": 0.1,
        "frequency_penalty": 0.5,
        "presence_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": 1.5, "6": -100},
        "allowed_token_ids": [5, 97, 5],
        "bad_words": ["hi"],
        "min_tokens": 4,
        "priority": 2,
    }
    assert world.http.post("/v1/completions", json=body).status_code == 200
    (sent,) = world.decode.generated
    assert sent.priority == 2
    assert sent.sampling == Sampling(
        temperature=0.5,
        seed=3,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.1,
        logit_bias=((5, 1.5), (6, -100.0)),
        allowed_token_ids=(5, 97),
        bad_words=((32, 104, 105), (104, 105)),
        min_tokens=4,
    )


def test_a_bad_word_may_be_as_long_as_a_word_may_be(world: World) -> None:
    assert world.post(prompt="a", bad_words=["\N{WAVING HAND SIGN}" * 256]).status_code == 200
    assert sorted(map(len, world.decode.generated[0].sampling.bad_words)) == [1024, 1025]


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_following_seeds(world: World, stream: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = world.complete(prompt=["ab", "xyz"], n=2, max_tokens=4, seed=2**63 - 1, stream=stream, **options)
    texts = [""] * 4
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
        usage = part.usage
    assert texts == ["abab", "abab", "xyzx", "xyzx"]
    assert (usage.prompt_tokens, usage.completion_tokens) == (5, 16)
    sent = sorted(world.decode.generated, key=lambda generate: generate.request_id)
    assert [generate.sampling.seed for generate in sent] == [2**63 - 1, 0, 2**63 - 1, 0]
    assert len({generate.request_id for generate in sent}) == 4


def test_every_answer_of_a_chat_begins_with_its_role(world: World) -> None:
    stream = world.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], max_tokens=3, n=3, stream=True
    )
    texts, roles = [""] * 3, [0] * 3
    for chunk in stream:
        for choice in chunk.choices:
            roles[choice.index] += choice.delta.role == "assistant"
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["u:h"] * 3
    assert roles == [1] * 3


def test_a_client_that_leaves_frees_all_its_answers(world: World) -> None:
    world.decode.hold_after = 1
    body = {"prompt": "ab", "n": 3, "max_tokens": 9, "stream": True}
    with world.http.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())
    wait_until(lambda: len(world.decode.cancelled) == 3)


def test_one_answer_that_fails_ends_all(world: World) -> None:
    world.decode.reject = "too_long"
    answer = world.http.post("/v1/completions", json={"prompt": ["a", "b"], "n": 2})
    assert answer.status_code == 400
    assert "too long" in answer.json()["error"]["message"]


def test_the_best_answers_are_the_likeliest_on_average(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    token = world.decode._token
    world.decode.chunks = [[65]]

    def scored(token_id: int, request: Any) -> Any:
        choice = int(request.request_id.rpartition("-")[2])
        made = token(65 + choice, request)
        return made._replace(logprob=[-3.0, -1.0, -2.0][choice])

    monkeypatch.setattr(world.decode, "_token", scored)
    answer = world.complete(prompt="x", best_of=3, n=2)
    assert [choice.text for choice in answer.choices] == ["B", "C"]
    assert [choice.logprobs for choice in answer.choices] == [None, None]
    assert answer.usage.completion_tokens == 3


@pytest.mark.parametrize(("kept", "text"), [(-1, "c" * (CONTEXT - 1)), (3, "bcc"), (1, "c")])
def test_of_a_prompt_the_end_is_kept(world: World, kept: int, text: str) -> None:
    body = {"prompt": "b" + "c" * (2 if kept > 0 else CONTEXT), "truncate_prompt_tokens": kept, "max_tokens": 1}
    assert world.http.post("/v1/completions", json=body).status_code == 200
    assert bytes(world.decode.generated[0].prompt_ids).decode() == text


def test_the_stop_string_or_token_may_be_part_of_the_text(world: World) -> None:
    world.decode.chunks = [list(b"abEN"), list(b"Dx")]
    include = {"include_stop_str_in_output": True}
    answer = world.complete(prompt="x", stop="END", extra_body=include)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abEND", "stop")
    world.decode.chunks = [list(b"ab"), [99]]
    stopping = {"stop_token_ids": [99], **include}
    assert world.complete(prompt="x", extra_body=stopping).choices[0].text == "abc"


def test_a_stop_string_counts_from_the_least_number_of_tokens_on(world: World) -> None:
    world.decode.chunks = [[byte] for byte in b"aXbXcX"]
    answer = world.complete(prompt="x", stop="X", max_tokens=9, extra_body={"min_tokens": 3})
    assert answer.choices[0].text == "aXb"


def test_special_tokens_may_be_part_of_the_text(world: World) -> None:
    world.decode.chunks = [[97, EOS, 98]]
    for skips, text in ((True, "ab"), (False, "a<eos>b")):
        answer = world.complete(prompt="x", extra_body={"ignore_eos": True, "skip_special_tokens": skips})
        assert answer.choices[0].text == text


def test_usage_may_come_with_every_chunk(world: World) -> None:
    body = {"prompt": "abc", "max_tokens": 3, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(world.http.post("/v1/completions", json=body | {"stream_options": options}))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]
    assert all(chunk["usage"]["prompt_tokens"] == 3 for chunk in chunks)
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


HEAD, *ROWS = readme_rows("fields")
ANY = {"guided_json", "output_config", "reasoning", "stream_options", "structured_outputs", "text"}
"""Fields that take any object."""
PATHS = [path.strip("`") for path in HEAD[1:]]
INPUT: dict[str, Any] = {"prompt": "a", "input": "a", "messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("path", PATHS)
def test_every_field_becomes_of_what_the_readme_says(world: World, path: str) -> None:
    needed = {**INPUT, "model": MODEL, "max_tokens": 1, "max_output_tokens": 1}
    body = {name: value for name, value in needed.items() if name in BODIES[path].model_fields}
    if path == "/tokenize":
        del body["prompt"]
    said = {field: row[1 + PATHS.index(path)] for row in ROWS for field in re.findall(r"`(\w+)`", row[0])}
    assert set(said.values()) <= set(CELLS)
    others = [field for field, word in said.items() if word != "yes"]
    assert world.http.post(path, json=body | dict.fromkeys(others)).status_code == 200
    for field, word in said.items():
        # No field takes this: what is carried out is refused as a wrong value, by name.
        answer = world.http.post(path, json=body | {field: {"a": {}}})
        message = (answer.json().get("error") or {}).get("message", "")
        assert message.startswith(f"{field}: not supported here") == (word == "refused"), (field, message)
        assert (answer.status_code == 200) == (word == "ignored") or (word == "yes" and field in ANY), (field, message)


def test_no_field_of_one_endpoint_is_lost_at_another_that_generates() -> None:
    generating = [path for path, body in BODIES.items() if body.generates]
    for row in ROWS:
        cells = {row[1 + PATHS.index(path)] for path in generating}
        assert not {"yes", "ignored"} <= cells, row


def test_a_field_that_nobody_knows_is_ignored_and_logged_once() -> None:
    policy = FieldPolicy(strict=False)
    with capture_logs() as logs:
        for name in ("brand_new", "brand_new", "x" * 100, "x" * 100 + "y"):
            policy.check({name: 1}, {})
        for number in range(2000):
            policy.check({f"field_{number}": 1}, {}, "messages.0.")
    assert [entry["field"] for entry in logs[:2]] == ["brand_new", "x" * 64]
    assert len(logs) == 1000


def test_fields_that_nobody_knows_can_be_refused() -> None:
    policy = FieldPolicy(strict=True)
    policy.check({"user": "me", "nothing": None}, {})
    with pytest.raises(ApiError, match=r"messages\.0\.brand_new: not known here"):
        policy.check({"brand_new": 1}, {}, "messages.0.")
    with pytest.raises(ApiError) as refused:
        policy.check({"x" * 80_000: 1}, {})
    assert len(str(refused.value.body())) < 1000, "what a client has sent is not sent back whole"


def test_a_request_with_unknown_fields_is_answered(world: World) -> None:
    unknown = {"brand_new": {"a": [1]}, "stream": True, "stream_options": {"new": 1}}
    assert world.http.post("/v1/completions", json={"prompt": "a", **unknown}).status_code == 200
    message = {"role": "user", "content": "hi", "new": 1}
    assert world.http.post("/v1/chat/completions", json={"messages": [message], "brand_new": 1}).status_code == 200
