"""lm-eval scores a local task against a service of real processes, with the numbers of transformers.

`make test-clients` installs it in an environment of its own and runs this file. `make test` does not collect it.
"""

import json
from pathlib import Path

import pytest
import torch

from model.tiny import write_tiny_checkpoint
from model.tiny_tokenizer import BEGIN_ID
from tests.clients.third_party import run
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import FAMILIES, Reference

QUESTIONS = [
    {"question": "What is the capital of Italy?", "options": ["Rome", "Bern", "Lyon"], "answer": 0},
    {"question": "How many legs has a spider?", "options": ["six", "eight", "a hundred and two"], "answer": 1},
    {"question": "The sea is " + "very " * 60, "options": ["wet", "dry"], "answer": 0},
]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}} Answer:"
doc_to_choice: "{{{{options}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
"""
ROLLING = """
task: local_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: question
metric_list: [{{metric: bits_per_byte}}]
"""


def samples(directory: Path, task: str) -> list[dict]:  # type: ignore[type-arg]
    [path] = directory.rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda sample: sample["doc_id"])


def score(reference: Reference, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The log probability of a continuation, and whether each of its tokens is the likeliest."""
    logprobs = reference.logprobs([*context, *continuation])[len(context) - 1 : -1]
    own = logprobs.gather(1, torch.tensor(continuation)[:, None]).squeeze(1)
    return float(own.sum()), bool((own == logprobs.amax(dim=1)).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_local_task_has_the_scores_of_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    write_tiny_checkpoint(checkpoint, family, seed=7)  # type: ignore[arg-type]
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, text in (("choice", CHOICE), ("rolling", ROLLING)):
        (tmp_path / f"{name}.yaml").write_text(text.format(data=data))
    with Cluster(checkpoint, tmp_path) as cluster:
        cluster.gateway(served_model_name="tiny")
        cluster.prefill(chunked_prefill_size=100)
        cluster.decode()
        cluster.wait_ready()
        arguments = {
            "base_url": f"{cluster.url}/v1/completions",
            "model": "tiny",
            "tokenizer": checkpoint,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
        }
        run(
            *("lm-eval", "lm_eval", "run", "--model", "local-completions"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
            *("--tasks", "local_choice,local_rolling", "--include_path", str(tmp_path)),
            *("--output_path", str(tmp_path / "scores"), "--log_samples"),
            HF_HUB_OFFLINE="1",
            HF_DATASETS_CACHE=str(tmp_path / "cache"),
        )
    reference = Reference(checkpoint)
    for question, sample in zip(QUESTIONS, samples(tmp_path, "local_choice"), strict=True):
        context = list(f"{question['question']} Answer:".encode())
        for option, (found,) in zip(question["options"], sample["resps"], strict=True):
            expected, greedy = score(reference, context, list(f" {option}".encode()))
            assert float(found[0]) == pytest.approx(expected, abs=1e-3)
            assert str(found[1]) == str(greedy)
    for question, sample in zip(QUESTIONS, samples(tmp_path, "local_rolling"), strict=True):
        [[found]] = sample["resps"]
        # The first token is predicted from the begin of sequence that lm-eval puts in front.
        expected, _ = score(reference, [BEGIN_ID], list(str(question["question"]).encode()))
        assert float(found) == pytest.approx(expected, abs=1e-3)
