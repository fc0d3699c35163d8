"""What `serve` hands to each of its processes."""

import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from base.errors import StartupError
from cli import serve
from cli.config import ServeConfig
from cli.main import app, main
from cli.serve import Child, ServePlan, devices_for, free_port, processes


@pytest.fixture(autouse=True)
def no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are of models that are not there, and of processes that share no memory."""
    monkeypatch.setattr(serve, "check_start", lambda config: None)
    monkeypatch.setattr(serve, "maps_other_processes", lambda: False)


def plan(devices: tuple[str, ...] = ("cpu",), **flags: object) -> ServePlan:
    return ServePlan(ServeConfig(model_path=Path("/m"), **flags), 8000, devices)  # type: ignore[arg-type]


def test_keys_reach_the_gateway_alone_and_not_on_a_command_line() -> None:
    gateway, *nodes = plan(api_keys=("sk-one", "sk-two")).children()
    assert gateway.secrets == {"HISPARSE_PD_API_KEY": "sk-one sk-two"}
    assert not any(child.secrets for child in nodes)
    assert not any("sk-" in word for child in (gateway, *nodes) for word in child.words)
    assert "sk-" not in repr(gateway) + repr(plan(api_keys=("sk-one",)))


def test_a_process_without_keys_does_not_inherit_them(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, str]] = []

    class Ended(subprocess.Popen[bytes]):
        def __init__(self, *args: object, env: dict[str, str], **options: object) -> None:
            started.append(env)
            super().__init__(["true"])

    monkeypatch.setenv("HISPARSE_PD_API_KEY", "sk-one")
    monkeypatch.setattr(serve.subprocess, "Popen", Ended)
    with processes([Child("gateway", [], 1, {"HISPARSE_PD_API_KEY": "sk-one"}), Child("decode-0", [], 2)]):
        assert [env.get("HISPARSE_PD_API_KEY") for env in started] == ["sk-one", None]


@pytest.mark.parametrize(
    ("asked", "maps", "given"), [("auto", True, "shm"), ("auto", False, None), ("tcp", True, "tcp")]
)
def test_nodes_that_can_share_memory_open_no_engine(
    monkeypatch: pytest.MonkeyPatch, asked: str, maps: bool, given: str | None
) -> None:
    monkeypatch.setattr(serve, "maps_other_processes", lambda: maps)
    for node in plan(transfer_protocol=asked).children()[1:]:
        words = dict(zip(node.words, node.words[1:], strict=False))
        assert words.get("--transfer-protocol") == given


def devices(children: list[Child]) -> list[str]:
    return [child.words[child.words.index("--device") + 1] for child in children]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "count_gpus", lambda: 4)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("device", "fraction", "numbers"),
    [("cuda", None, [0, 1, 2]), ("cuda", 0.4, [0, 1, 2, 3, 0]), ("cuda:1", None, [1, 1, 1]), ("cpu", None, [])],
)
def test_every_node_has_a_gpu_of_its_own_or_what_it_may_take(
    device: str, fraction: float | None, numbers: list[int]
) -> None:
    count = len(numbers) or 3
    gateway, *nodes = plan(decode_nodes=count - 1, devices=devices_for(device, count, fraction)).children()
    assert "--device" not in gateway.words
    assert devices(nodes) == ([f"cuda:{number}" for number in numbers] or ["cpu"] * 3)


@pytest.mark.parametrize(
    ("gpus", "nodes", "message"),
    [(4, 5, r"5 nodes, one per GPU, and this machine has 4; .* --mem-fraction-static"), (0, 1, "has no CUDA device")],
)
def test_more_nodes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, gpus: int, nodes: int, message: str) -> None:
    monkeypatch.setattr(serve, "count_gpus", lambda: gpus)
    with pytest.raises(StartupError, match=message):
        devices_for("cuda", nodes, None)


@pytest.mark.usefixtures("four_gpus")
def test_a_node_of_several_ranks_has_as_many_gpus_from_its_own_on() -> None:
    with pytest.raises(StartupError, match="5 nodes, one per GPU"):
        serve.plan(ServeConfig(model_path=Path("/m"), device="cuda", decode_nodes=2, decode_ranks=2))
    four = serve.plan(ServeConfig(model_path=Path("/m"), device="cuda", decode_ranks=3))
    _, prefill, decode = four.children()
    assert devices([prefill, decode]) == ["cuda:0", "cuda:1"]
    assert decode.words[decode.words.index("--ranks") + 1] == "3"
    assert "--ranks" not in prefill.words
    both = serve.plan(ServeConfig(model_path=Path("/m"), device="cuda", prefill_ranks=2, decode_ranks=2))
    _, prefill, decode = both.children()
    assert devices([prefill, decode]) == ["cuda:0", "cuda:2"]
    assert prefill.words[prefill.words.index("--ranks") + 1] == "2"


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ServePlan]:
    """What `serve` would start, given these words behind its model."""

    def planned(*words: str) -> ServePlan:
        plans: list[ServePlan] = []
        monkeypatch.setattr(serve, "serve_until_stopped", lambda plan: plans.append(plan) or 0)
        with pytest.raises(SystemExit) as ended:
            main(["serve", "--model-path", "/m", *words])
        assert ended.value.code == 0
        return plans[0]

    return planned


Planned = Callable[..., ServePlan]
GROUP: Any = typer.main.get_command(app)


def values_of(parameter: Any) -> Iterator[list[str]]:
    """The words of that flag with each kind of value that is not its default."""
    if parameter.is_flag:
        yield [parameter.opts[0]]
    elif parameter.type_descriptor.choices:
        yield from ([parameter.opts[0], choice] for choice in parameter.type_descriptor.choices)
    else:
        yield [parameter.opts[0], "64" if parameter.type_descriptor.annotation in (int, float) else "some"]


def shared(command: str) -> Iterator[tuple[list[str], str]]:
    """Flags of `serve` with their values, and those processes of `command` that are to get them."""
    takers = {parameter.name for parameter in GROUP.commands[command].params} - {
        "help",
        "config",
        "api_keys",
        "port",
        "device",
    }
    own = {"host", "insecure"} if command != "gateway" else set()
    for parameter in GROUP.commands["serve"].params:
        if parameter.name in takers - own - {"model_path"}:
            yield from ((words, command) for words in values_of(parameter))


@pytest.mark.parametrize(
    ("words", "command"), [each for role in ("gateway", "prefill", "decode") for each in shared(role)]
)
def test_a_flag_of_serve_reaches_each_process_that_takes_it(planned: Planned, words: list[str], command: str) -> None:
    """And those processes read there what `serve` was given."""
    given = GROUP.commands["serve"].make_context("serve", ["--model-path", "/m", *words]).params
    for child in planned(*words).children():
        if child.words[0] == command:
            read = GROUP.commands[command].make_context(command, child.words[1:]).params
            name = next(each.name for each in GROUP.commands["serve"].params if words[0] in each.opts)
            assert read[name] == given[name]


def test_nodes_stay_on_the_loopback_interface(planned: Planned) -> None:
    gateway, *nodes = planned("--host", "10.0.0.1", "--insecure", "--api-key", "sk-one").children()
    assert {"--host", "--insecure"} <= set(gateway.words)
    for node in nodes:
        assert not {"--host", "--insecure"} & set(node.words)
    assert not any("sk-one" in word for child in (gateway, *nodes) for word in child.words)


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.0.0.1", "http://10.0.0.1:8000"), ("::1", "http://[::1]:8000"), ("::", "http://127.0.0.1:8000")],
)
def test_the_gateway_is_asked_at_an_address_that_it_listens_to(host: str, url: str) -> None:
    assert plan(host=host).url == url


def test_prompts_that_nothing_would_compute_are_refused_at_start(refused: Callable[..., str]) -> None:
    said = refused("serve", "--model-path", "/m", "--prefill-nodes", "0")
    assert "--prefill-nodes 0: nothing would compute prompts; give --allow-local-prefill" in said


# --- ports for processes that are about to start ---


@pytest.fixture
def two_ports(monkeypatch: pytest.MonkeyPatch) -> range:
    """The only ones to choose from, which nobody else does."""
    ports = range(19990, 19992)
    monkeypatch.setattr(serve, "_PORTS", ports)
    monkeypatch.setattr(serve, "_claims", type(serve._claims)(maxlen=64))
    return ports


def test_a_port_that_listens_is_not_chosen(two_ports: range) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", two_ports[0]))
        taken.listen()
        assert free_port() == two_ports[1]


def test_a_port_that_was_chosen_is_not_chosen_again_before_it_is_used(two_ports: range) -> None:
    """Processes take seconds to start, and other services may be started meanwhile, by other processes too."""
    mine = free_port()
    ask = f"from cli import serve; serve._PORTS = range({two_ports.start}, {two_ports.stop}); print(serve.free_port())"
    theirs = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True).stdout
    assert {mine, int(theirs)} == set(two_ports)
    assert free_port() == int(theirs), "whoever chose it has ended"


def test_a_port_that_another_service_has_is_refused_at_start(refused: Callable[..., str]) -> None:
    """That service would be asked whether the gateway is ready."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = refused("serve", "--model-path", "anywhere", "--port", str(port))
    assert said == f"error: --port {port}: 127.0.0.1 cannot be listened on (Address already in use)"


def test_a_process_of_this_machine_is_asked_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert serve.is_ready(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
