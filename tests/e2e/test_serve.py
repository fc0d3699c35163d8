"""`serve` and the demo start several processes and leave none behind."""

import re
import signal
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import psutil
import pytest
import trustme

from tests.e2e.asking import Job, complete
from tests.e2e.cluster import START_TIMEOUT_S, all_gone, children_of, wait_until
from tests.e2e.conftest import References, Serve


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_serve_listens_at_loopback_alone_and_leaves_no_process(
    serve: Serve, references: References, number: int
) -> None:
    process, url = serve("--transfer-protocol", "auto")
    prompt = [1, 2, 3, 4] * 40
    assert complete(url, [Job(prompt, 8)]) == [references["deepseek_v32"].generate(prompt, 8)]
    children = children_of(process)
    assert len(children) == 3
    ports = [port for child in children for port in child.net_connections("tcp") if port.status == "LISTEN"]
    assert len(ports) >= 6
    assert {port.laddr.ip for port in ports} == {"127.0.0.1"}
    process.send_signal(number)
    code = process.wait(timeout=30)
    assert code == (0 if number != signal.SIGKILL else -signal.SIGKILL)
    wait_until(lambda: all_gone(children), what="the processes to be gone")


@pytest.mark.slow
def test_serve_over_https_with_a_key_that_nobody_else_sees(serve: Serve, tmp_path: Path, log: Path) -> None:
    authority, certfile, keyfile = trustme.CA(), tmp_path / "cert.pem", tmp_path / "key.pem"
    leaf = authority.issue_cert("127.0.0.1")
    leaf.cert_chain_pems[0].write_to_path(certfile)
    leaf.private_key_pem.write_to_path(keyfile)
    secret = "sk-secret-0123456789abcdef"
    words = ["--ssl-certfile", str(certfile), "--ssl-keyfile", str(keyfile), "--api-key", secret]
    process, url = serve(*words, "--log-level", "debug", certfile=certfile)
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    with (
        httpx.Client(verify=trust) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key=secret, http_client=http, max_retries=0) as client,
    ):
        assert client.completions.create(model="tiny", prompt=[1, 2, 3], max_tokens=4).usage is not None
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="sk-wrong").models.list()
        assert secret not in http.get(f"{url}/metrics").text
    wait_until(lambda: "ready: OpenAI API at https://" in log.read_text(), what="serve to say so")
    assert secret not in log.read_text()

    family = [psutil.Process(process.pid), *children_of(process)]
    titles = [Path(f"/proc/{member.pid}/cmdline").read_text().strip("\0 ") for member in family]
    assert [title.split()[1] for title in titles] == ["serve", "gateway", "prefill", "decode"]
    assert not any(secret in title for title in titles)
    assert not any(secret.encode() in Path(f"/proc/{member.pid}/environ").read_bytes() for member in family)


@pytest.mark.slow
def test_when_one_process_ends_serve_says_which_and_ends_the_others(serve: Serve) -> None:
    process, _ = serve("--prefill-nodes", "2")
    children = children_of(process)
    assert len(children) == 4
    victim = next(child for child in children if "prefill" in " ".join(child.cmdline()))
    victim.kill()
    assert process.wait(timeout=30) == 1
    wait_until(lambda: all_gone(children), what="the processes to be gone")


@pytest.fixture
def tiny(checkpoints: dict[str, Path]) -> Path:
    return checkpoints["deepseek_v32"]


def refused(*words: str) -> list[str]:
    """The lines on standard error of `serve` that does not start."""
    serve = [sys.executable, "-m", "cli.main", "serve", "--port", "0", *words]
    done = subprocess.run(serve, capture_output=True, text=True, timeout=START_TIMEOUT_S)
    assert done.returncode == 2
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--model-path", "/nonexistent"), "error: --model-path /nonexistent: no such directory"),
        (("--hisparse-config", '{"top_k": 3}'), "error: hisparse-config: top_k is 3, but the model selects 64"),
        (("--mem-fraction-static", "2"), "error: --mem-fraction-static 2.0: expected a number between 0 and 1"),
    ],
)
def test_serve_starts_nothing_that_would_be_refused(tiny: Path, words: tuple[str, ...], reason: str) -> None:
    [line] = refused("--model-path", str(tiny), *words)
    assert line.startswith(reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "who"), [(("--decode-ranks", "2", "--prefill-ranks", "2"), r"-0: rank \d"), ((), "-0")]
)
def test_the_last_line_of_a_failed_start_is_the_reason(tiny: Path, words: tuple[str, ...], who: str) -> None:
    *_, last = refused("--model-path", str(tiny), "--attention-backend", "triton", *words)
    assert re.match(
        f"error: (prefill|decode){who}: --attention-backend triton runs on CUDA devices, not on cpu; ", last
    )


DEMO = [sys.executable, "-m", "benchmarks.demo"]


@pytest.mark.slow
def test_the_demo_finds_the_pass_keys_and_leaves_nothing_behind() -> None:
    demo = subprocess.Popen(DEMO, stdout=subprocess.PIPE, text=True)
    children: list[psutil.Process] = []
    wait_until(lambda: len(children_of(demo)) == 3, what="the demo's processes")  # type: ignore[arg-type]
    children = children_of(demo)  # type: ignore[arg-type]
    output, _ = demo.communicate(timeout=240)
    assert demo.returncode == 0
    keys = re.findall(r"^   The pass key of (\w+) is (\d{5})\.$", output, re.MULTILINE)
    assert len(keys) == 3
    for word, key in keys:
        assert f"Question: What is the pass key of {word}?\nAnswer:   The pass key of {word} is {key}." in output
    assert "3 of 3 right" in output
    for line in ("context", "hot buffer", "hit rate", "time to first token", "time between tokens", "transfer rate"):
        assert re.search(rf"^{line}( +\S+){{3,}}$", output, re.MULTILINE), line
    assert all_gone(children)


@pytest.mark.slow
def test_serve_that_is_asked_to_end_finishes_what_its_clients_wait_for(serve: Serve, references: References) -> None:
    process, url = serve()
    children = children_of(process)
    prompt = [1, 2, 3, 4] * 40
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, url, [Job(prompt, 200)])
        wait_until(lambda: 'requests{state="running"} 1.0' in httpx.get(f"{url}/metrics").text, what="a stream")
        process.terminate()
        [tokens] = answer.result()
        assert len(tokens) == 200
        assert tokens == references["deepseek_v32"].likeliest(prompt, tokens)
    assert process.wait(timeout=30) == 0
    wait_until(lambda: all_gone(children), what="the processes to be gone")
