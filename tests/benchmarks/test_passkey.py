"""Questions for pass keys: what they look like, which answers are right, and the report on a service that was asked."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.passkey import BEGIN_ID, CHECKPOINT, CONTEXT_LENGTH
from benchmarks.passkey.__main__ import main
from benchmarks.passkey.question import KEYS, make_question
from benchmarks.serving.stub import MODEL, Reply
from gateway.tokenizer import CheckpointTokenizer
from tests.benchmarks.conftest import Json

SENTENCE = re.compile(r"^The pass key of (\w+) is (\d{5})\.$", re.MULTILINE)


@given(seed=st.integers(0, 1000), length=st.integers(512, CONTEXT_LENGTH), depth=st.none() | st.floats(0, 1))
@settings(max_examples=50)
def test_a_text_has_pass_keys_one_of_which_is_asked_for(seed: int, length: int, depth: float | None) -> None:
    question = make_question(str(seed), length, depth)
    found = SENTENCE.findall(question.text)
    assert len(dict(found)) == KEYS
    assert dict(found)[question.word] == question.key
    assert question.text[question.place :].startswith(f"The pass key of {question.word} is {question.key}.\n")
    assert question.prompt == (f"<|begin|>{question.text}\nQuestion: What is the pass key of {question.word}? Answer: ")
    assert question == make_question(str(seed), length, depth)


@pytest.mark.parametrize("length", [512, 4096])
def test_a_prompt_has_as_many_tokens_as_asked_for(length: int) -> None:
    ids = CheckpointTokenizer(str(CHECKPOINT)).encode(make_question("0", length).prompt, special_tokens=True)
    assert len(ids) == length
    assert ids[0] == BEGIN_ID


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        ("KEY", True),
        ("KEY\nQues", True),
        ("The pass key of river is KEY.", True),
        ("KEY1", False),
        ("12 KEY", False),
        ("", False),
        ("none", False),
    ],
)
def test_an_answer_is_right_if_its_first_number_is_the_key(answer: str, is_right: bool) -> None:
    question = make_question("0", 512)
    assert question.is_answered_by(answer.replace("KEY", question.key)) is is_right


class Scholar:
    """Reads the key in the prompt, and gets every question wrong whose prompt has 512 tokens."""

    def __init__(self) -> None:
        self.asked: list[Json] = []

    async def answer(self, request: Json, reply: Reply) -> None:
        self.asked.append(request)
        prompt = request["prompt"]
        key = dict(SENTENCE.findall(prompt))[prompt.split()[-2].removesuffix("?")]
        tokens = 1 + len(prompt.removeprefix("<|begin|>"))
        reply.whole(200, {"choices": [{"text": key if tokens != 512 else key[::-1] + "0"}]})


def test_an_exam_counts_by_length_quotes_errors(stub: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    scholar = Scholar()
    url = stub(scholar.answer)
    main(base_urls=[f"one={url}", f"two={url}"], lengths="512,1K", count=3)
    output = capsys.readouterr().out
    for label in ("one", "two"):
        assert re.search(rf"^{label} +0 of 3 +3 of 3 *$", output, re.MULTILINE), output
        assert len(re.findall(rf"^{label}: 512 tokens, \w+: \d{{5}}, answered '", output, re.MULTILINE)) == 3
    assert len(scholar.asked) == 2 * 2 * 3
    assert scholar.asked[0] | {"prompt": 0} == {"model": MODEL, "prompt": 0, "max_tokens": 8, "temperature": 0}
    assert len({request["prompt"] for request in scholar.asked}) == 2 * 3, "all services are asked the same"
