"""The page at /status in a browser, while requests run, a node dies and they migrate. Takes Chromium and playwright."""

import math
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest

from control import membership
from control.messages import CacheUpdate, Cancel, Generate, Heartbeat, Message, NodeTotals, Output, Peer, Token
from gateway import cluster_status
from gateway.config import GatewayConfig
from tests.gateway.nodes import FakeDecodeNode, FakeNode, wait_until
from tests.gateway.test_access import key_file
from tests.gateway.world import RunningGateway
from tests.skips import impossible

CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip(impossible("there is no Chromium (apt-get install chromium)"), allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason=impossible("there is no playwright"))

pytestmark = pytest.mark.slow
SIZES = {"phone": {"width": 390, "height": 844}, "desk": {"width": 1440, "height": 900}}
NEVER_PREFILLED = 300
"""Tokens of a prompt that nodes accept, and do nothing about."""


@dataclass
class _Stream:
    asked: Generate
    sent: int


class SteadyNode(FakeDecodeNode):
    """A decode node that sends each of its requests a token now and then, and reports its load."""

    def __init__(self, address: str, room: int) -> None:
        self.streams: dict[str, _Stream] = {}
        self.room, self.ticks, self.steps = room, 0, 0
        super().__init__(address)
        self.membership.heartbeat = self._load
        self.control.periodically(0.02, self._tick)

    def deliver(self, sender: Peer, message: Message) -> None:
        if isinstance(message, Cancel):
            self.streams.pop(message.request_id, None)
        super().deliver(sender, message)

    def _generate(self, request: Generate) -> None:
        if not self.generated[1:]:
            blocks = np.arange(self.room // 40, dtype=np.uint64)
            self.control.send(self._gateway, CacheUpdate.of(1, blocks, blocks[:0], whole=True))
        self.hold_after = 0
        super()._generate(request)
        self.streams[request.request_id] = _Stream(request, len(request.generated))

    def _tick(self) -> None:
        self.ticks += 1
        self.steps += len(self.streams)
        for number, (request_id, stream) in enumerate(list(self.streams.items())):
            prompt = len(stream.asked.prompt_ids)
            if prompt == NEVER_PREFILLED or (self.ticks + number) % (2 + self.ticks // 80 % 3):
                continue
            last = stream.sent + 1 == stream.asked.max_new_tokens
            cached = prompt // 3 if stream.sent == 0 else 0
            token = Output(request_id, stream.sent, (Token(97),), "length" if last else None, cached_tokens=cached)
            self.send(token)
            stream.sent += 1
            if last:
                del self.streams[request_id]

    def _load(self, via: str) -> Heartbeat:
        held = sum(len(stream.asked.prompt_ids) + stream.sent for stream in self.streams.values())
        usage, running = min(1.0, held / self.room), len(self.streams)
        return Heartbeat(
            via=via,
            ready=True,
            queued_tokens=held,
            running_requests=running,
            kv_usage=usage,
            hot_usage=(1 + usage) / 2,
            totals=NodeTotals(hits=1950 * self.steps, misses=98 * self.steps, swapped_bytes=98 * 656 * 61 * self.steps),
        )


def prompts_of(phase: float) -> Callable[[str], Heartbeat]:
    """What a prefill node reports: prompts of some thousand tokens, in waves."""

    def load(via: str) -> Heartbeat:
        share = 0.4 + 0.3 * math.sin(phase + time.monotonic())
        tokens, prompts = int(30_000 * share), int(8 * share)
        totals = NodeTotals(transferred_bytes=int(2e9 * (time.monotonic() + math.sin(phase + time.monotonic()))))
        return Heartbeat(
            via=via, ready=True, queued_tokens=tokens, running_requests=prompts, kv_usage=share, totals=totals
        )

    return load


@dataclass
class Service:
    """A gateway with nodes, and clients that ask all the time until `quiet`."""

    gateway: RunningGateway
    nodes: list[SteadyNode]
    quiet: threading.Event

    @property
    def url(self) -> str:
        return f"{self.gateway.url}/status"

    def ask(self, seed: int) -> None:
        choice = random.Random(seed)
        with httpx.Client(base_url=self.gateway.url, headers={"Authorization": "Bearer sk-client"}) as http:
            while not self.quiet.is_set():
                tokens = NEVER_PREFILLED if seed == 0 else choice.randrange(20, 200)
                body = {"prompt": [97] * tokens, "max_tokens": choice.randrange(20, 150), "temperature": 0}
                http.post("/v1/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def service(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    keys = key_file(tmp_path_factory.mktemp("keys"), "sk-ops name=ops\n")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ended:
        # The ten minutes of the page pass in twelve seconds.
        patch.setattr(cluster_status, "SAMPLE_S", 0.1)
        patch.setattr(membership, "HEARTBEAT_S", 0.05)
        flags: dict[str, Any] = {"api_keys": ("sk-client",), "operator_key_file": keys, "status_page": True}
        gateway = RunningGateway(GatewayConfig(model_path=checkpoint, port=0, control_port=0, **flags))
        ended.callback(gateway.stop)
        nodes = [SteadyNode(gateway.control_address, room=2500) for _ in range(3)]
        prefill = [FakeNode(gateway.control_address, "prefill") for _ in range(2)]
        for phase, node in enumerate(prefill):
            node.membership.heartbeat = prompts_of(phase)
        for node in (*prefill, *nodes):
            ended.callback(node.start().die)
        service = Service(gateway, nodes, threading.Event())
        clients = [threading.Thread(target=service.ask, args=(seed,)) for seed in range(24)]
        for client in clients:
            client.start()
            ended.callback(client.join, 20)
        ended.callback(gateway.stop)
        ended.callback(service.quiet.set)
        yield service


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, service: Service) -> Iterator[Open]:
    """Opens the page as an operator. What the browser complains of fails the test."""
    complaints: list[str] = []
    with ExitStack() as closed:

        def opened(size: str = "desk", scheme: Literal["light", "dark"] = "light", key: str = "sk-ops") -> Any:
            context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, device_scale_factor=1)
            closed.callback(context.close)
            page = context.new_page()
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(service.url)
            if key:
                log_in(page, key)
                page.wait_for_selector("#report:not([hidden])")
            return page

        yield opened
    assert [text for text in complaints if "401" not in text and "403" not in text and "ERR_FAILED" not in text] == []


def log_in(page: Any, key: str) -> None:
    page.get_by_label("Operator's key").fill(key)
    page.get_by_role("button").click()


def shot(page: Any, tmp_path: Path, name: str, **options: Any) -> None:
    """Keeps a picture: in HISPARSE_PD_SCREENSHOTS, if that is set."""
    file = Path(os.environ.get("HISPARSE_PD_SCREENSHOTS", tmp_path)) / f"{name}.png"
    page.screenshot(path=file, full_page=True, **options)


def change(page: Any, change: Callable[[Any], Any]) -> None:
    """From now on /v1/cluster says something else."""
    page.route("**/v1/cluster", lambda route: route.fulfill(json=change(route.fetch().json())))


def wait_for_text(page: Any, selector: str, text: str) -> None:
    """What a selector finds first has that text."""
    page.locator(selector).filter(has_text=text).first.wait_for(timeout=20_000)


def test_the_page_asks_for_an_operator_s_key(open_page: Open) -> None:
    page = open_page(key="")
    wait_for_text(page, "#state", "Operators only")
    for key, said in (("sk-wrong", "expected an operator's key"), ("sk-client", "only operators see")):
        log_in(page, key)
        wait_for_text(page, "#state", said)
        assert page.locator("#report").is_hidden()
    log_in(page, "sk-ops")
    wait_for_text(page, "#state", "Requests are served")
    assert page.locator("#login").is_hidden()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_everything_is_shown_at_every_size(
    open_page: Open, service: Service, tmp_path: Path, size: str, scheme: Literal["light", "dark"]
) -> None:
    page = open_page(size, scheme)
    page.wait_for_function("document.querySelectorAll('#requests tbody tr').length > 9")
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]["width"]
    is_dark = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every((part) => part < 64)")
    assert is_dark == (scheme == "dark")
    shot(page, tmp_path, f"{size}-{scheme}")
    for node in service.nodes:
        row = page.locator("#decode tbody tr", has_text=node.me.address)
        text = row.inner_text()
        assert all(
            unit in text
            for unit in (
                "ready",
                "running",
                "tokens/s",
                "tokens",
                "%",
                "B/s",
                " hits",
                "tokens cached",
                "prompt tokens",
            )
        ), text
        for plot in ("Requests", "Generated", "Queue", "Host slots in use", "Hot slots in use", "Swapped in"):
            drawn = row.get_by_role("img", name=f"{plot}, last ten minutes: from ").locator("path.line")
            assert drawn.get_attribute("d").startswith("M"), plot
    assert page.locator("#prefill tbody tr").count() == 2
    assert page.locator("table th:not([scope])").count() == 0
    assert page.get_by_role("columnheader", name="Prefix hits").count() == 1
    assert page.get_by_role("rowheader").count() > 5
    wait_for_text(page, "#requests tr", "queue, prefill or transfer for 127.0.0.1")
    wait_for_text(page, "#requests tr", "decode at 127.0.0.1")


def test_names_of_nodes_and_requests_are_never_html(open_page: Open) -> None:
    evil = "<img src=x onerror=alert(1)><script>document.title='owned'</script>"
    page = open_page()

    def renamed(report: Any) -> Any:
        for node in report["nodes"]:
            node["address"] = evil
        return report | {"slowest": [report["slowest"][0] | {"request_id": evil, "phase": "streaming", "node": evil}]}

    change(page, renamed)
    wait_for_text(page, "#decode th", evil)
    wait_for_text(page, "#requests th", evil)
    wait_for_text(page, "#requests td", f"decode at {evil}")
    assert page.locator("img, body script").count() == 0
    assert page.title() == "Status · hisparse-pd"


def test_what_is_missing_is_said_in_words(open_page: Open) -> None:
    page = open_page()
    change(page, lambda report: report | {"nodes": [], "slowest": [], "unready": "no live decode node is registered"})
    wait_for_text(page, "#state", "No request can be served: no live decode node is registered.")
    for text in ("No decode node is registered.", "No prefill node is registered.", "No request is being answered."):
        wait_for_text(page, ".empty:visible", text)
    assert page.locator("table:visible").count() == 0
    page.unroute("**/v1/cluster")
    page.route("**/v1/cluster", lambda route: route.abort())
    wait_for_text(page, "#state", "The gateway does not answer since")


def test_a_node_dies_and_its_requests_are_seen_to_move(open_page: Open, service: Service, tmp_path: Path) -> None:
    page = open_page()
    dying = service.nodes[-1]
    wait_until(lambda: len(dying.streams) > 2)
    dying.die()
    row = page.locator("#decode tbody tr", has_text=dying.me.address)
    row.filter(has_text="lost").wait_for(timeout=20_000)
    wait_for_text(page, "#requests td", "1 time")
    wait_for_text(page, "#state", "1 of 5 nodes not ready")
    assert "last heard" in row.inner_text()
    shot(page, tmp_path, "status", clip={"x": 0, "y": 0, "width": 1440, "height": 1300})
    assert page.locator("#requests td", has_text=f"decode at {dying.me.address}").count() == 0
