"""What a user gives that cannot be measured is one line, and what a service answers that is no answer is a failure."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

from benchmarks import gateway, loading
from benchmarks.decode import curves
from benchmarks.fetch import __main__ as fetch
from benchmarks.grammar import __main__ as grammar
from benchmarks.logits import __main__ as logits
from benchmarks.passkey import __main__ as passkey
from benchmarks.prefix import __main__ as prefix
from benchmarks.program import run
from benchmarks.ranks import __main__ as ranks
from benchmarks.serving import stub as stub_program
from benchmarks.serving.stub import Reply, token_event, usage_event
from benchmarks.swap_in import eviction, foresight, published, record, unions
from tests.benchmarks.conftest import Json, bench, in_full, refusal, started
from tests.benchmarks.test_programs import narrow_config
from tests.e2e.cluster import START_TIMEOUT_S, all_gone, children_of, wait_until
from tests.test_house import ROOT

Main = Callable[..., None]
FEW = ("--input-tokens", "5", "--output-tokens", "2", "--concurrency", "1", "--num-requests", "1")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with files that are not what they are given as."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("a text\n")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "trace").write_text('{"input_length": 700, "hash_ids": [1, 2]}\n')
    (tmp_path / "prompts").write_text('{"prompt": [2147483648]}\n')
    (tmp_path / "binary").write_bytes(b"\x80")
    (tmp_path / "empty").touch()
    (tmp_path / "nested").write_text("[" * 100_000)
    (tmp_path / "no-cases").write_text('{"config": {"context": 8, "speculative_num_steps": 0}, "cases": []}')
    for name, positions, first in (
        ("few.npz", [[3, 1, 0]], 9),
        ("beyond.npz", [[3, 1, 99]] * 4, 9),
        ("nothing.npz", [[-1, -1, 9]], 9),
        ("long.npz", [[3, 1, 0]] * 201, 9),
        ("longer.npz", [[3, 1, 0]] * 202, 9),
    ):
        np.savez(tmp_path / name, positions=positions, first=first)
    return tmp_path


def refused(main: Main, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The line with which a program refuses these words."""
    monkeypatch.setattr(sys, "argv", ["program", *words])
    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("main", "words", "reason"),
    [
        (loading.main, "new --device cuda:99", "--device cuda:99: this machine has"),
        (loading.main, "new --device cpu --dtype decimal", "--dtype decimal: expected"),
        (loading.main, ". --device cpu", "no *.safetensors"),
        (grammar.main, "--device tpu", "--device tpu: expected cpu, cuda or cuda:N"),
        (logits.main, "--device tpu", "--device tpu: expected cpu, cuda or cuda:N"),
        (record.main, "--device tpu", "--device tpu: expected cpu, cuda or cuda:N"),
        (record.main, "--prompt nowhere", "nowhere"),
        (record.main, "--prompt-tokens 9000000", "a passage has at most"),
        (eviction.main, "--top-k 9 --context-length 8", "--context-length 8: expected at least 9"),
        *((main, "--trace nowhere", "nowhere") for main in (eviction.main, unions.main, foresight.main)),
        *((main, "--trace text", "text: no recorded trace") for main in (eviction.main, unions.main)),
        *(
            (main, f"--trace {trace}.npz", f"{trace}.npz: no recorded trace")
            for main in (eviction.main, unions.main, foresight.main)
            for trace in ("beyond", "nothing")
        ),
        (eviction.main, "--top-k 9000 --context-length 40000 --steps 1", "4 times 9000 hot slots: expected 9000 to"),
        (eviction.main, "--top-k 1", "--top-k"),
        (unions.main, "--trace few.npz", "few.npz: 1 steps were recorded: expected at least 4"),
        (foresight.main, "--trace few.npz", "1 steps were recorded: expected more than 200"),
        (foresight.main, "--trace long.npz --trace longer.npz", "expected layers of one run"),
        *(
            (main, f"--trace long.npz --hot-ratio {ratio}", f"{ratio} times 3 hot slots: expected 3 to 32767")
            for main in (unions.main, foresight.main)
            for ratio in ("0.5", "nan", "inf")
        ),
        (published.main, "--out nowhere/out.npz", "nowhere/out.npz cannot be written"),
        (record.main, "--prompt binary", "--prompt binary: 'utf-8' codec"),
        (record.main, "--prompt empty", "--prompt empty: expected a text, found no token"),
        (record.main, "--out text/traces", "--out text/traces: Not a directory"),
        *(
            (ranks.main, f"--device cpu {flag}", flag.split()[0])
            for flag in ("--layers -1", "--context 0", "--batch 0", "--prompt -1", "--chunk 0")
        ),
        (curves.main, "nowhere", "nowhere"),
        (curves.main, "no-cases", "no-cases: no figures of benchmarks.decode.in_turns"),
        (curves.main, "nested", "nested: no figures of benchmarks.decode.in_turns"),
        (prefix.main, "--trace nested", "nested, line 1: no request of a trace"),
        (curves.main, "text", "text: no figures of benchmarks.decode.in_turns"),
        (curves.main, "config.json", "config.json: no figures of benchmarks.decode.in_turns"),
        (gateway.main, "--core 4096", "--core 4096: expected one of"),
        (gateway.main, "--rounds 0", "--rounds"),
        (gateway.main, "--tokens 4096", "--tokens"),
        (fetch.main, "--lengths 0", "--lengths 0: expected multiples"),
        (fetch.main, "--fetch-rate many", "--fetch-rate many: expected numbers"),
        (fetch.main, "--fetch-rate -5", "--fetch-rate -5: expected numbers above 0"),
        (prefix.main, "--json nowhere/out.json", "nowhere/out.json cannot be written"),
        (prefix.main, "--trace trace --slots inf%", "--slots inf%: expected slots"),
        (stub_program.main, "--port TAKEN", "cannot listen"),
    ],
)
def test_a_program_refuses_in_one_line_and_writes_nothing(
    main: Main,
    words: str,
    reason: str,
    stub: Callable[..., str],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, port = set(folder.iterdir()), stub().rpartition(":")[2]
    assert reason in refused(main, words.replace("TAKEN", port).split(), monkeypatch, capsys)
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(
    "request_of_trace",
    [
        {"input_length": 0, "hash_ids": []},
        {"input_length": -5, "hash_ids": []},
        {"input_length": 5, "hash_ids": [-1]},
        {"input_length": 5, "hash_ids": [2**34]},
        {"input_length": 5, "hash_ids": [2**80]},
        {"input_length": 5, "hash_ids": [[1]]},
        {"input_length": 5, "hash_ids": [1], "timestamp": float("nan")},
        {"input_length": 5, "hash_ids": [1], "output_length": float("inf")},
    ],
)
def test_a_line_that_is_no_request_of_a_trace_is_named(
    request_of_trace: Json, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace"
    path.write_text(f'{{"input_length": 5, "hash_ids": [1]}}\n{json.dumps(request_of_trace)}\n')
    assert f"{path}, line 2: no request of a trace" in refusal(capsys, "serving", "--trace", str(path))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("serving --base-url http://127.0.0.1:1", "no service answers at http://127.0.0.1:1/v1/models"),
        ("serving --base-url localhost:8000", "--base-url localhost:8000: expected http://HOST:PORT"),
        ("serving --base-url STUB --model gpt-9", "does not serve 'gpt-9', but 'stub'"),
        ("serving --base-url STUB --model-path /m", "--model-path: for a service that is started here"),
        ("serving --base-url STUB -- --device cuda", "flags of serve: for a service that is started here"),
        ("serving --base-url STUB --concurrency 4 --request-rate 1", "--concurrency or --request-rate"),
        ("serving --base-url STUB --concurrency 0", "--concurrency 0: expected at least 1"),
        ("serving --base-url STUB --extra-body []", "--extra-body []: expected a JSON object"),
        ("serving --base-url STUB --range-ratio 1", "--range-ratio 1.0: expected 0 or more, and less than 1"),
        ("serving --model m", "--model: the name of a model at --base-url"),
        ("serving --model-path /nowhere", "--model-path /nowhere: no config.json"),
        ("serving --input-tokens 16384 --output-tokens 1", "16385 tokens of prompt and answer: the model that is"),
        ("serving --trace trace --turns 2 --input-tokens 9", "--input-tokens, --turns: a trace has its own"),
        ("serving --speed 2 --limit 3", "--limit, --speed: for --trace, which is not given"),
        ("serving --trace trace --block-tokens 100", "--block-tokens 100: expected a multiple of 64"),
        ("serving --trace trace --speed 0", "--speed 0: expected more than 0"),
        ("serving --trace trace --concurrency 1,2", "--trace: expected one load"),
        ("serving --trace /nowhere", "--trace /nowhere: "),
        ("serving --prompts trace --turns 2", "--prompts: with --turns and --shared-prefix, prompts are random"),
        ("serving --base-url http://127.0.0.1:1 --variant on=", "--variant: for a service that is started here"),
        ("serving --base-url STUB --json nowhere/out.json", "nowhere/out.json cannot be written"),
        ("serving --base-url STUB --png .", ". cannot be written"),
        ("serving --base-url STUB --api-key schlüssel", "--api-key: expected ASCII"),
        ("serving --base-url STUB --base-url STUB", "two services are called"),
        ("serving --base-url STUB --vocab-size 2147483649", "2147483649"),
        ("serving --base-url STUB --prompts prompts", "--prompts prompts, line 1: expected"),
        ("serving --base-url STUB --trace trace --speed nan", "--speed nan: expected more than 0"),
        ("transfer --role initiator", "--role initiator needs --target HOST:PORT"),
        ("transfer --role initiator --target nowhere", "--target nowhere: expected HOST:PORT"),
        ("transfer --role initiator --target 127.0.0.1:1", "no target at 127.0.0.1:1"),
        ("transfer --target 127.0.0.1:1", "--target is for --role initiator"),
        ("transfer --protocol udp", "--protocol udp: expected tcp or rdma or shm"),
        ("transfer --protocol rdma", "no RDMA device"),
    ],
)
def test_a_command_refuses_in_one_line_and_writes_nothing(
    words: str, reason: str, stub: Callable[..., str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, url = set(folder.iterdir()), stub()
    assert reason in refusal(capsys, *words.replace("STUB", url).split())
    assert set(folder.iterdir()) == before


@pytest.mark.parametrize(
    "event",
    [
        token_event(token_ids=["x"]),
        token_event(token_ids=[1 << 40]),
        token_event(token_ids=[-1]),
        '{"choices": [], "usage": {"prompt_tokens": 1e999, "completion_tokens": 1}}',
        usage_event(-1, -7),
        "[" * 100_000,
    ],
    ids=("words", "large", "negative", "infinite", "negative usage", "deep"),
)
def test_nonsense_in_an_answer_is_a_failure_of_that_request(
    event: Json | str, stub: Callable[..., str], tmp_path: Path
) -> None:
    async def answer(request: Json, reply: Reply) -> None:
        reply.start()
        for one in (token_event(token_ids=[1]), event, "[DONE]"):
            reply.event(one)
        reply.end()

    words = ["--base-url", stub(answer), *FEW, "--warmup-requests", "0", "--shared-prefix", "4"]
    (point,) = bench(tmp_path, *words, code=1)["points"]
    assert point["failed"] == {"malformed event": 1}


def test_an_address_that_lists_no_models_is_one_line(stub: Callable[..., str], tmp_path: Path) -> None:
    """Among others, a body that is not compressed as its header says."""
    program = (
        "import socket; server = socket.create_server(('127.0.0.1', 0)); print(server.getsockname()[1], flush=True)\n"
        "connection, _ = server.accept(); connection.recv(9999)\n"
        "connection.sendall(b'HTTP/1.1 200 OK\\r\\nContent-Encoding: gzip\\r\\nContent-Length: 4\\r\\n\\r\\nabcd')\n"
        "connection.recv(9999)"
    )
    with started([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        command = [sys.executable, "-m", "cli.main", "bench", "serving"]
        words = ["--base-url", f"http://127.0.0.1:{server.stdout.readline().strip()}"]
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: no service answers at http://127.0.0.1:")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("body", [{"choices": None}, {"choices": [{}]}, {"choices": [7]}])
def test_an_exam_ends_at_an_answer_that_is_none(
    body: Json, stub: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(request: Json, reply: Reply) -> None:
        reply.whole(200, body)

    words = ["--base-url", stub(answer), "--lengths", "512", "--count", "1"]
    assert "gave no answer" in refused(passkey.main, words, monkeypatch, capsys)


def test_an_infinite_speed_is_written_as_json_has_it(stub: Callable[..., str], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text('{"input_length": 5, "hash_ids": [1]}\n')
    words = ["--trace", str(trace), "--speed", "inf", "--request-timeout", "inf", "--warmup-requests", "0"]
    options = bench(tmp_path, "--base-url", stub(in_full), *words)["options"]
    assert (options["speed"], options["request_timeout"]) == ("inf", "inf")
    json.loads((tmp_path / "out.json").read_text(), parse_constant=lambda word: pytest.fail(word))


def test_a_checkpoint_that_was_not_written_whole_is_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "_write_shard", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loading.write_checkpoint(tmp_path / "new", narrow_config())
    assert not (tmp_path / "new" / "config.json").exists()


def test_the_stub_answers_nonsense_and_ends_what_asks_for_nothing(stub: Callable[..., str]) -> None:
    url = stub(stub_program.Steps(0.001).answer)
    assert httpx.post(f"{url}/v1/completions", content=b"{", timeout=10).status_code == 400
    assert httpx.post(f"{url}/v1/completions", json=[], timeout=10).status_code == 400
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=10).status_code == 400
    text = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "max_tokens": 0}, timeout=10).text
    assert text.endswith("data: [DONE]\n\n")


def longest_s(processes: Iterable[psutil.Process]) -> float:
    """User seconds of the process that has computed longest, of those that have not ended."""
    return max((one.cpu_times().user for one in processes if one.is_running()), default=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("words", [["reading"], ["fetch", "--lengths", "4K"], ["gateway"]])
def test_an_interrupt_ends_all_processes_without_a_traceback(words: list[str], tmp_path: Path) -> None:
    """As by Ctrl-C: each process of the group gets the signal."""
    command = [sys.executable, "-m", f"benchmarks.{words[0]}", *words[1:]]
    with (
        (tmp_path / "log").open("w+") as log,
        started(command, cwd=tmp_path, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        wait_until(lambda: longest_s(children_of(process)) > 3, START_TIMEOUT_S, "a process to run")
        below = children_of(process)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 130
        wait_until(lambda: all_gone(below), timeout=10, what="all processes to end")
        log.seek(0)
        assert "Traceback" not in log.read()


def test_a_step_that_the_script_for_gpus_does_not_have_is_refused(tmp_path: Path) -> None:
    script = ["sh", "benchmarks/gpu.sh", str(tmp_path), "top_k"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "gpu.sh: no step is called top_k\n")
