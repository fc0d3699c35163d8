"""The bounds on one client and on one process in docs/operations/secure.md are those of the code."""

import re
from pathlib import Path

import pytest

from control.connections import MAX_QUEUED
from control.grammar import MAX_LARK, MAX_TEXT
from control.messages import requests
from control.messages.common import MAX_ATTEMPTS, MAX_LISTED
from control.plane import MAX_FRAME_BYTES
from control.prompt_logprobs import MAX_PROMPT_LOGPROBS
from decode_node.config import DecodeConfig
from engine.grammar.compiler import CompilerLimits
from gateway.answers.completions import MAX_ECHO_CHARS
from gateway.config import GatewayConfig
from gateway.formats import tools
from gateway.preparer import MAX_SETTINGS_BYTES
from gateway.requests.chat import MAX_TOOLS
from gateway.requests.generation import MAX_PRIORITY, MAX_STOP_CHARS, MAX_STOPS
from gateway.requests.responses import MAX_METADATA
from prefill_node.planner import MAX_DECODE_NODES
from service.shell import MOST_TAKEN

PAGE = Path(__file__).parents[2] / "docs" / "operations" / "secure.md"
BOUNDS = PAGE.read_text().partition("\n## Bounds on one client\n")[2]
MIB = 2**20


def default(config: type[GatewayConfig] | type[DecodeConfig], name: str) -> object:
    return config.__dataclass_fields__[name].default


@pytest.mark.parametrize(
    ("row", "bounds"),
    [
        ("`logit_bias`", [requests.MAX_BIASES]),
        ("`bad_words`", [requests.MAX_BIASES // 2, MAX_STOP_CHARS, requests.MAX_BAD_WORD_TOKENS]),
        ("`allowed_token_ids`", [requests.MAX_ALLOWED]),
        ("parts of tools' schemas", [tools.MAX_STEPS]),
        ("the grammar of calls", [MAX_LARK]),
        ("answers to one request", [requests.MAX_CHOICES]),
        ("settings that are sent", [MAX_SETTINGS_BYTES // MIB]),
        ("prompts in the answers", [MAX_ECHO_CHARS // MIB]),
        ("`prompt_logprobs`", [MAX_PROMPT_LOGPROBS]),
        ("`stop`", [MAX_STOPS, MAX_STOP_CHARS]),
        ("`tools`", [MAX_TOOLS]),
        ("`metadata`", [MAX_METADATA]),
        ("the structure of an answer", [MAX_TEXT, MAX_LARK]),
        ("compiling that structure", [CompilerLimits.seconds, CompilerLimits.waiting, CompilerLimits.entries]),
        ("`priority`", [-MAX_PRIORITY, MAX_PRIORITY]),
        ("Answers to one request", [default(GatewayConfig, "max_answer_mib")]),
        ("Answers to all requests", [default(GatewayConfig, "max_total_answer_mib")]),
        ("a frame", [MAX_FRAME_BYTES // MIB]),
        ("nodes in a list", [MAX_LISTED, MAX_ATTEMPTS]),
        ("messages that a node takes", [MOST_TAKEN]),
        ("frames that wait", [MAX_QUEUED]),
        ("requests that wait", [default(DecodeConfig, "max_queued_requests")]),
        ("requests of one `Generate`", [requests.MAX_CHOICES]),
        ("penalties, biases", [requests.MAX_STOP_IDS]),
        ("log probabilities of a prompt", [MAX_PROMPT_LOGPROBS]),
        ("decode nodes that a prefill node", [MAX_DECODE_NODES]),
    ],
)
def test_a_documented_bound_is_the_one_in_force(row: str, bounds: list[float]) -> None:
    [text] = re.findall(rf"^\| {re.escape(row)}[^|]*\|([^|]*)\|", BOUNDS, re.MULTILINE)
    numbers = {float(number.replace(",", "")) for number in re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)}
    assert set(bounds) <= numbers
