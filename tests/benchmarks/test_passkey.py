"""Questions for pass keys: what they look like, which answers are right, and the report on a service that was asked."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from base.errors import StartupError
from benchmarks.passkey import BEGIN_ID, CHECKPOINT, CONTEXT_LENGTH
from benchmarks.passkey.__main__ import main
from benchmarks.passkey.exam import questions
from benchmarks.passkey.question import KEYS, make_question
from benchmarks.serving.services import Local, variant
from gateway.tokenizer import CheckpointTokenizer

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


def test_lengths_that_cannot_be_are_refused() -> None:
    for lengths in ([100], [1024, 10_000_000]):
        with pytest.raises(StartupError, match=f"--lengths {','.join(map(str, lengths))}: a (text|passage)"):
            questions(lengths, 1, seed=0)


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


class Scholar(BaseHTTPRequestHandler):
    """Reads the key in the prompt, and gets every question wrong whose prompt has 512 tokens."""

    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._say({"data": [{"id": "scholar"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(request)
        prompt = request["prompt"]
        word = prompt.split()[-2].removesuffix("?")
        key = dict(SENTENCE.findall(prompt))[word]
        tokens = 1 + len(prompt.removeprefix("<|begin|>"))
        self._say({"choices": [{"text": key if tokens != 512 else key[::-1] + "0"}]})

    def _say(self, content: object) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def scholar() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scholar)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_exam_counts_by_length_and_quotes_what_is_wrong(scholar: str, capsys: pytest.CaptureFixture[str]) -> None:
    Scholar.asked.clear()
    main(base_urls=[f"one={scholar}", f"two={scholar}"], lengths="512,1K", count=3)
    output = capsys.readouterr().out
    for label in ("one", "two"):
        assert re.search(rf"^{label} +0 of 3 +3 of 3 *$", output, re.MULTILINE), output
        assert len(re.findall(rf"^{label}: 512 tokens, \w+: \d{{5}}, answered '", output, re.MULTILINE)) == 3
    assert len(Scholar.asked) == 2 * 2 * 3
    assert Scholar.asked[0] | {"prompt": 0} == {"model": "scholar", "prompt": 0, "max_tokens": 8, "temperature": 0}
    assert len({request["prompt"] for request in Scholar.asked}) == 2 * 3, "all services are asked the same"


def test_a_service_that_does_not_answer_is_one_line() -> None:
    with pytest.raises(StartupError, match="no service answers at http://127"):
        main(base_urls=["http://127.0.0.1:1"], count=1)


@pytest.mark.parametrize(
    ("words", "label", "flags"),
    [
        ("", "default", ()),
        ("--dtype float32", "--dtype float32", ("--dtype", "float32")),
        ("--dtype=float32", "--dtype=float32", ("--dtype=float32",)),
        ('fp32, all=--hisparse-config {"a":1}', "fp32, all", ("--hisparse-config", '{"a":1}')),
    ],
)
def test_a_variant_has_further_flags_and_maybe_a_label(words: str, label: str, flags: tuple[str, ...]) -> None:
    assert variant(words, CHECKPOINT, ["--device", "cuda"]) == Local(label, CHECKPOINT, ("--device", "cuda", *flags))


def test_flags_of_serve_are_not_for_a_service_that_runs() -> None:
    with pytest.raises(StartupError, match="for services that are started here"):
        main(["--dtype", "float32"], base_urls=["http://127.0.0.1:1"])
