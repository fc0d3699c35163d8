"""The OpenAI API over real HTTP, with the official client where it can say what is meant."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from control.messages import Output, Token
from gateway import decode_client
from gateway.requests.body import HARMLESS, RequestBody
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.completions import CompletionRequest
from tests.gateway.nodes import CONTEXT, wait_until
from tests.gateway.world import EOS, MODEL, World, chunks_of


@pytest.fixture(autouse=True)
def _reset(world: World) -> None:
    world.decode.reset()


def test_completion(world: World) -> None:
    answer = world.complete(prompt="héllo", max_tokens=9, seed=-1, temperature=0.5)
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == "héllohé"
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 9)
    sent = world.decode.generated[0]
    assert sent.prompt_ids == tuple("héllo".encode())
    assert sent.stop_token_ids == (EOS,)
    assert sent.sampling.temperature == 0.5
    assert sent.sampling.seed == 2**63 - 1
    assert sent.prefill_nodes == (world.prefill.me,)


def test_defaults(world: World) -> None:
    world.complete(prompt="a", extra_body={"top_k": -1, "user": "me"})
    world.complete(prompt="a" * (CONTEXT - 3))
    assert [g.max_new_tokens for g in world.decode.generated] == [16, 3]
    assert world.decode.generated[0].sampling.top_k == 0


@pytest.mark.parametrize("prompt", [[104, 105], [[104, 105]], ["hi"]])
def test_prompt_forms(world: World, prompt: object) -> None:
    answer = world.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "return_token_ids": True})
    choice = answer.json()["choices"][0]
    assert choice["text"] == "hihi"
    assert choice["token_ids"] == [104, 105, 104, 105]


def test_chat(world: World) -> None:
    answer = world.client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "be"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        ],
        max_completion_tokens=5,
    )
    assert bytes(world.decode.generated[0].prompt_ids) == b"s:be\nu:hi\na:"
    assert answer.choices[0].message.content == "s:be\n"
    assert answer.choices[0].message.role == "assistant"


def test_the_chat_template_gets_names_and_variables(world: World) -> None:
    world.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "name": "Eva", "content": "hi"}],
        max_tokens=1,
        extra_body={"chat_template_kwargs": {"thinking": True}},
    )
    assert bytes(world.decode.generated[0].prompt_ids) == b"uEva:hi\na:<think>"


def test_an_answer_of_the_client_may_be_sent_back_as_it_came(world: World) -> None:
    question: dict[str, Any] = {"role": "user", "content": "hi"}
    answer = world.client.chat.completions.create(model=MODEL, messages=[question], max_tokens=4)
    said = answer.choices[0].message.model_dump()
    world.client.chat.completions.create(model=MODEL, messages=[question, said, question], max_tokens=1)
    assert bytes(world.decode.generated[1].prompt_ids) == b"u:hi\na:u:hi\nu:hi\na:"


def test_stop_token_ids_end_an_answer_beside_the_models_own(world: World) -> None:
    stopping = {"stop_token_ids": [99]}
    answer = world.complete(prompt="abc", extra_body=stopping)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    world.complete(prompt="abc", extra_body=stopping | {"ignore_eos": True})
    assert [g.stop_token_ids for g in world.decode.generated] == [(EOS, 99), (99,)]


def test_fields_that_ask_for_nothing_are_accepted(world: World) -> None:
    def idle(kind: type[RequestBody]) -> dict[str, Any]:
        fields = {name: values for name, values in kind.not_carried_out().items() if name not in kind.model_fields}
        own = {name: values[0] if values else None for name, values in fields.items()}
        return {**own, **dict.fromkeys(HARMLESS, "x")}

    world.complete(prompt="a", extra_body=idle(CompletionRequest))
    turns = [{"role": "user", "content": "hi"}]
    world.client.chat.completions.create(model=MODEL, messages=turns, extra_body=idle(ChatCompletionRequest))


def test_streaming_completion(world: World) -> None:
    chunks = list(world.complete(prompt="né", max_tokens=6, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "néné"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 5 + ["length"]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6
    assert len({chunk.id for chunk in chunks}) == 1


def test_streamed_token_ids_are_each_chunks_own(world: World) -> None:
    body = {"prompt": "你", "max_tokens": 3, "stream": True, "return_token_ids": True}
    choices = [chunk["choices"][0] for chunk in chunks_of(world.http.post("/v1/completions", json=body))]
    assert [choice["token_ids"] for choice in choices] == [[b] for b in "你".encode()]
    assert "token_ids" not in world.http.post("/v1/completions", json=body | {"return_token_ids": False}).text
    assert [choice["text"] for choice in choices] == ["", "", "你"]


def test_completion_logprobs(world: World) -> None:
    answer = world.complete(prompt="ab", max_tokens=2, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}]
    assert logprobs.text_offset == [0, 1]


def test_chat_logprobs(world: World) -> None:
    answer = world.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "a"}],
        max_tokens=1,
        logprobs=True,
        top_logprobs=2,
    )
    logprobs = answer.choices[0].logprobs
    assert (logprobs.content[0].token, logprobs.content[0].bytes) == ("u", [117])
    assert [entry.token for entry in logprobs.content[0].top_logprobs] == ["u", "v"]


def test_the_bytes_of_tokens_make_up_the_text(world: World) -> None:
    world.decode.chunks = [[byte] for byte in "a你🙂\n b".encode()] + [[EOS]]
    answer = world.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], logprobs=True, extra_body={"ignore_eos": True}
    )
    logprobs = answer.choices[0].logprobs
    *own, eos = [bytes(entry.bytes or []) for entry in logprobs.content]
    assert b"".join(own).decode() == answer.choices[0].message.content == "a你🙂\n b"
    assert eos == b"<eos>"


@pytest.mark.parametrize("stream", [False, True])
def test_text_offsets_are_places_in_the_text(world: World, stream: bool) -> None:
    world.decode.chunks = [list("a你".encode()), list("🙂bEN".encode()), list(b"D")]
    answer = world.complete(prompt="x", logprobs=0, stop="END", stream=stream)
    parts = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    assert "".join(part.text for part in parts) == "a你🙂b"
    offsets = [offset for part in parts for offset in part.logprobs.text_offset]
    assert offsets == [0, 1, 1, 1, 2, 2, 2, 2, 3, *([4, 5, 6] if stream else [4, 4, 4])]


def test_stop_token_is_counted_but_not_shown(world: World) -> None:
    world.decode.chunks = [[104], [105, EOS], [106]]
    answer = world.complete(prompt="x")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hi", "stop")
    assert answer.usage.completion_tokens == 3
    ignoring = world.complete(prompt="x", extra_body={"ignore_eos": True})
    assert (ignoring.choices[0].text, ignoring.choices[0].finish_reason) == ("hij", "length")


def test_stop_string_across_tokens(world: World) -> None:
    world.decode.chunks = [list(b"ab"), list(b"cE"), list(b"N"), list(b"Dxy"), list(b"z")]
    answer = world.complete(prompt="x", stop=["END", "nowhere"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abc", "stop")
    assert answer.usage.completion_tokens == 6
    chunks = list(world.complete(prompt="x", stop="END", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_stop_string_stops_the_decode_node(world: World) -> None:
    world.decode.hold_after = 6
    answer = world.complete(prompt="abc", max_tokens=100, stop="bc")
    assert answer.choices[0].text == "a"
    # Those of requests before this test may come late.
    wait_until(lambda: world.decode.cancelled.count(answer.id) == 1)


def test_client_exceptions(world: World) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        world.client.completions.create(model="gpt-5" + 80_000 * "x", prompt="a")
    assert unknown.value.code == "model_not_found"
    assert len(str(unknown.value)) < 1000, "what a client has sent is not sent back whole"
    with pytest.raises(openai.BadRequestError) as too_long:
        world.complete(prompt="a", max_tokens=CONTEXT)
    assert too_long.value.code == "context_length_exceeded"


def test_a_model_of_several_names_is_listed_and_asked_by_each(checkpoint: Path) -> None:
    with World(checkpoint, served_model_name=("tiny", "gpt-4")) as service:
        assert [model.id for model in service.client.models.list()] == ["tiny", "gpt-4"]
        assert service.client.models.retrieve("gpt-4").id == "gpt-4"
        for name in ("tiny", "gpt-4"):
            assert service.client.completions.create(model=name, prompt=[1, 2, 3], max_tokens=2).model == "tiny"
        with pytest.raises(openai.NotFoundError, match="this server serves 'tiny', 'gpt-4'"):
            service.client.models.retrieve("gpt-5")


def test_unknown_paths_and_methods(world: World) -> None:
    assert world.http.get("/v1/nothing").json()["error"]["message"] == "/v1/nothing: Not Found"
    answer = world.http.get("/v1/completions")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "POST")
    answer = world.http.post("/health")
    assert answer.status_code == 405
    assert set(answer.headers["Allow"].split(", ")) == {"GET", "HEAD"}


def test_many_at_once(world: World) -> None:
    prompts = [f"<{i}>" for i in range(32)]

    def complete(prompt: str) -> str:
        stream = world.complete(prompt=prompt, max_tokens=40, stream=True)
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(complete, prompts)) == [(prompt * 40)[:40] for prompt in prompts]


def test_lost_repeated_outputs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_client, "RESEND_FOR_S", 0.3)
    world.decode.chunks = [list(b"ab")]
    world.decode.extra_outputs = [
        Output(request_id="-", start=0, tokens=(Token(token_id=97), Token(token_id=98), Token(token_id=99))),
        Output(request_id="-", start=1, tokens=(Token(token_id=98),)),
        Output(request_id="-", start=3, finish_reason="length"),
    ]
    assert world.complete(prompt="x").choices[0].text == "abc"
    world.decode.extra_outputs = [Output(request_id="-", start=4, tokens=(Token(token_id=98),))]
    with pytest.raises(openai.InternalServerError, match="tokens 2 to 3 were lost"):
        world.complete(prompt="x")
    wait_until(lambda: world.decode.cancelled.count(world.decode.generated[1].request_id) == 1)


def test_metrics(world: World) -> None:
    def sample(name: str) -> float:
        lines = world.http.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"hisparse_pd_{name} "))

    grows = ['requests_finished_total{reason="length"}', "ttft_seconds_count", "inter_token_seconds_count"]
    before = [sample(name) for name in grows]
    world.complete(prompt="x")
    assert [sample(name) - was for name, was in zip(grows, before, strict=True)] == [1, 1, 15]
    assert sample('nodes{role="decode"}') == 1
    assert sample('requests{state="running"}') == 0
