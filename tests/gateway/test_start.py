"""Starting and stopping the process: what it refuses to start with, and that signals end it cleanly."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer

from gateway.tokenizer import CheckpointTokenizer
from tests.gateway.world import EOS, RunningGateway, World, write_checkpoint


@pytest.mark.parametrize(
    ("complaint", "flags"),
    [
        ("no such directory", {"model_path": Path("nowhere")}),
        (r"no config\.json", {"model_path": Path(__file__).parent}),
        ("expected 2 to 512", {"context_length": 513}),
        ("--tool-call-parser glm47: expected the tool call parser deepseek_v32", {"tool_call_parser": "glm47"}),
        (r"--chat-template .*none\.jinja: .*No such file", {"chat_template": Path("none.jinja")}),
        ("--max-total-body-mib 1 is less than the largest body, 2 MiB", {"max_body_mib": 2, "max_total_body_mib": 1}),
        (
            "--max-total-answer-mib 1 is less than what one request may take, 2",
            {"max_answer_mib": 2, "max_total_answer_mib": 1},
        ),
        ("--api-key-file none: No such file", {"api_key_file": Path("none")}),
        ("--priority-key-file none: other clients need keys, too", {"priority_key_file": Path("none")}),
        ("--operator-key-file none: other clients need keys, too", {"operator_key_file": Path("none")}),
        ("--status-page.* give --operator-key-file", {"status_page": True, "api_keys": ("sk-client",)}),
    ],
)
def test_unusable_flags_stop_the_start(
    tmp_path: Path, start_error: Callable[..., str], complaint: str, flags: dict[str, Any]
) -> None:
    checkpoint = write_checkpoint(tmp_path, chat_template=None)
    assert re.search(complaint, start_error(**{"model_path": checkpoint, **flags}))


@pytest.mark.parametrize("damage", [None, "{", "{}"])
def test_missing_or_broken_tokenizer(tmp_path: Path, start_error: Callable[..., str], damage: str | None) -> None:
    directory = write_checkpoint(tmp_path)
    (directory / "tokenizer.json").unlink()
    if damage is not None:
        (directory / "tokenizer.json").write_text(damage)
    assert "cannot load its tokenizer" in start_error(model_path=directory)


def test_config_without_a_vocabulary(tmp_path: Path, start_error: Callable[..., str]) -> None:
    directory = write_checkpoint(tmp_path)
    (directory / "config.json").write_text(json.dumps({"model_type": "deepseek_v32"}))
    assert "vocab_size must be a positive integer, found None" in start_error(model_path=directory)


def test_a_model_without_a_chat_template_has_completions_only(tmp_path: Path) -> None:
    with World(write_checkpoint(tmp_path, chat_template=None, model_type="glm_moe_dsa")) as world:
        answer = world.http.post("/v1/chat/completions", json={"messages": [{"role": "user"}]})
    assert answer.status_code == 400
    assert "use /v1/completions" in answer.json()["error"]["message"]


def test_stop_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path)
    assert CheckpointTokenizer(str(directory)).stop_token_ids == (EOS,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert CheckpointTokenizer(str(directory)).stop_token_ids == (3, 4)
    (directory / "generation_config.json").write_text('{"eos_token_id": null}')
    assert CheckpointTokenizer(str(directory)).stop_token_ids == (EOS,)


@pytest.mark.parametrize("named", ["LlamaTokenizerFast", "PreTrainedTokenizer", "PreTrainedTokenizerFast"])
def test_the_tokenizer_is_that_of_the_file_whatever_class_is_named(tmp_path: Path, named: str) -> None:
    """Published checkpoints name several, for which transformers' own choice comes to the same."""
    directory = write_checkpoint(tmp_path)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": named, "add_bos_token": True}))
    ours, theirs = CheckpointTokenizer(str(directory)), AutoTokenizer.from_pretrained(directory)
    for text in ("", " two  words ", "<|user|>ä\n"):
        for special in (False, True):
            assert ours.encode(text, special_tokens=special) == theirs.encode(text, add_special_tokens=special)


def test_a_gateway_does_not_load_torch(checkpoint: Path) -> None:
    """It would take longer to load than all the rest, and 200 MB."""
    code = (
        "import sys\n"
        "import gateway.process\n"
        "from gateway.tokenizer import CheckpointTokenizer\n"
        f"tokenizer = CheckpointTokenizer({str(checkpoint)!r})\n"
        "tokenizer.decode(tokenizer.encode('some text', special_tokens=True))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_token_ids_that_the_tokenizer_lacks_are_no_text(checkpoint: Path) -> None:
    tokenizer = CheckpointTokenizer(str(checkpoint))
    assert tokenizer.decode([104, 99999, 105]) == "hi"
    assert tokenizer.piece(99999) == ""


def test_ports_in_use(start_error: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "cannot bind the HTTP port" in start_error(port=port)
        assert "cannot bind the control port" in start_error(control_port=port)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_the_process_cleanly(checkpoint: Path, number: signal.Signals) -> None:
    code = (
        "from pathlib import Path\n"
        "from gateway.config import GatewayConfig\n"
        "from gateway.process import run_gateway\n"
        f"run_gateway(GatewayConfig(model_path=Path({str(checkpoint)!r}), port=0, control_port=0))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stderr is not None
    seen = ""
    while "gateway starts" not in seen:
        line = process.stderr.readline()
        assert line, seen
        seen += line
    process.send_signal(number)
    rest = process.communicate(timeout=30)[1]
    assert process.returncode == 0, rest
    assert "Traceback" not in rest
    assert "gateway stops" in rest


def test_metrics_can_have_a_port_of_their_own(start_gateway: Callable[..., RunningGateway]) -> None:
    """Names of clients and the load are nothing for clients."""
    gateway = start_gateway(metrics_port=0)
    own = f"http://127.0.0.1:{gateway.gateway.metrics_port}"
    assert "hisparse_pd_nodes" in httpx.get(f"{own}/metrics").text
    assert httpx.get(f"{own}/v1/models").status_code == 404
    assert httpx.get(f"{gateway.url}/metrics").status_code == 404
    assert httpx.get(f"{gateway.url}/health").status_code == 200
