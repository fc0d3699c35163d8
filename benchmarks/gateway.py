"""`python -m benchmarks.gateway`: what a streamed token costs the gateway.

A gateway process on one core serves streams of one scripted decode node, which computes nothing: in every step each
request gets a token, all of them in one message. A client process reads the streams and counts their events. What is
reported is the processor time of the gateway process alone, between the first step and the last.
"""

import contextlib
import multiprocessing
import os
import queue
import selectors
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from typing import Annotated

import psutil
import typer

from base.errors import StartupError
from benchmarks.passkey import CHECKPOINT
from benchmarks.program import run, uninterrupted
from benchmarks.scripted_node import ScriptedNode
from benchmarks.serving.services import wait_ready
from cli.serve import LOOPBACK, Child, arguments, free_port, processes
from control.messages import Accepted, Cancel, Ended, FinishReason, Generate, Message, Output, Outputs, Peer, Token
from service.lifecycle import raise_file_limit

_CONTEXT = 4096
_TEXT = b"The quick brown fox jumps over the lazy dog. "
_READY_S = 60.0
_MOST_STREAMS = 4096


class SteppingNode(ScriptedNode):
    """A decode node that keeps the requests that it is sent, and gives each a token when it is told to."""

    def __init__(self, gateway_address: str) -> None:
        self.requests: dict[str, Peer] = {}
        super().__init__(gateway_address, "decode", max_request_tokens=_CONTEXT)

    def step(self, number: int, last: bool) -> None:
        """Send every request a token."""
        token = Token(token_id=_TEXT[number % len(_TEXT)])
        reason: FinishReason | None = "length" if last else None
        by_gateway: dict[str, tuple[Peer, list[Output]]] = {}
        for request_id, gateway in list(self.requests.items()):
            output = Output(request_id=request_id, start=number, tokens=(token,), finish_reason=reason)
            by_gateway.setdefault(gateway.boot_id, (gateway, []))[1].append(output)
        for gateway, outputs in by_gateway.values():
            self.control.send(gateway, Outputs.of(outputs))

    def deliver(self, sender: Peer, message: Message) -> None:
        match message:
            case Generate():
                for one in message.each():
                    self.requests[one.request_id] = sender
                    self.control.send(sender, Accepted(request_id=one.request_id))
            case Ended() | Cancel():
                self.requests.pop(message.request_id, None)
            case _:
                super().deliver(sender, message)


def _read_streams(port: int, path: str, body: bytes, streams: int, events: "multiprocessing.Queue[int]") -> None:
    """The client process: open the streams, read them to their ends, and say how many events came."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    tails: dict[int, bytes] = {}
    for _ in range(streams):
        connection = socket.create_connection((LOOPBACK, port))
        connection.sendall(head.encode() + body)
        selector.register(connection, selectors.EVENT_READ)
        tails[connection.fileno()] = b""
    count = 0
    while tails:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(1 << 16)
            text = tails[key.fd] + data
            count += text.count(b"data: {") - tails[key.fd].count(b"data: {")
            tails[key.fd] = text[-32:]
            if not data or b"[DONE]" in text[-64:]:
                selector.unregister(key.fileobj)
                key.fileobj.close()
                del tails[key.fd]
    events.put(count)


@contextlib.contextmanager
def _gateway(core: int, endpoint: str | None) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """A gateway process on one core, its HTTP port and its control port. endpoint: for traces, if it makes any."""
    http, control = free_port(), free_port()
    flags = {"--model-path": CHECKPOINT, "--host": LOOPBACK, "--port": http, "--control-port": control}
    limits = {"--max-concurrent-requests": _MOST_STREAMS, "--context-length": _CONTEXT}
    words = arguments({**flags, **limits, "--otlp-traces-endpoint": endpoint})
    with tempfile.TemporaryFile() as log, processes([Child("gateway", ["gateway", *words], http)], log) as children:
        try:
            os.sched_setaffinity(children["gateway"].pid, {core})
            yield children["gateway"], http, control
        except StartupError as error:
            log.seek(0)
            raise StartupError(f"{error}; the gateway: {log.read().decode()[-1000:]}") from None


def measure(
    path: str, body: bytes, streams: int, tokens: int, interval_s: float, core: int, endpoint: str | None
) -> tuple[float, float]:
    """Microseconds of the gateway's processor per token, and events per token that the client got."""
    with _gateway(core, endpoint) as (process, port, control_port), contextlib.ExitStack() as at_end:
        address = f"{LOOPBACK}:{control_port}"
        prefill, decode = ScriptedNode(address, "prefill", max_request_tokens=_CONTEXT), SteppingNode(address)
        for node in (prefill, decode):
            at_end.callback(node.die)
            node.run(tick_s=0.1)
        wait_ready(f"http://{LOOPBACK}:{port}", {"gateway": process}, _READY_S)
        events: multiprocessing.Queue[int] = multiprocessing.Queue()
        client = multiprocessing.Process(target=_read_streams, args=(port, path, body, streams, events))
        with uninterrupted():
            client.start()
        at_end.callback(client.kill)
        until = time.monotonic() + _READY_S
        while len(decode.requests) < streams:
            if time.monotonic() > until:
                raise StartupError(f"{len(decode.requests)} of {streams} requests have arrived")
            time.sleep(0.05)
        time.sleep(0.5)
        usage = psutil.Process(process.pid)
        before = sum(usage.cpu_times()[:2])
        for number in range(tokens):
            decode.step(number, last=number == tokens - 1)
            time.sleep(interval_s)
        try:
            count = events.get(timeout=_READY_S)
        except queue.Empty:
            raise StartupError(f"the streams have not ended {_READY_S:.0f} s after the last step") from None
        spent = sum(usage.cpu_times()[:2]) - before
        return spent / (streams * tokens) * 1e6, count / (streams * tokens)


def main(
    streams: Annotated[int, typer.Option(min=1, max=_MOST_STREAMS, help="Streams at a time.")] = 512,
    tokens: Annotated[int, typer.Option(min=1, max=_CONTEXT // 2, help="Tokens of each stream.")] = 200,
    interval_ms: Annotated[float, typer.Option(min=0, help="From one step of the decode node to the next.")] = 40.0,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each endpoint; the median is printed.")] = 3,
    core: Annotated[int, typer.Option(help="Which core the gateway gets.")] = 0,
    otlp_traces_endpoint: Annotated[str | None, typer.Option(help="Where the gateway exports traces to.")] = None,
) -> None:
    """Measure the processor time of the gateway for each streamed token."""
    if core not in (cores := os.sched_getaffinity(0)):
        raise StartupError(f"--core {core}: expected one of {', '.join(map(str, sorted(cores)))}")
    raise_file_limit()
    prompt = f'"stream": true, "max_tokens": {tokens}, "temperature": 0'
    bodies = {
        "/v1/completions": f'{{"prompt": "hello", {prompt}}}',
        "/v1/chat/completions": f'{{"messages": [{{"role": "user", "content": "hello"}}], {prompt}}}',
    }
    for path, body in bodies.items():
        results = [
            measure(path, body.encode(), streams, tokens, interval_ms / 1e3, core, otlp_traces_endpoint)
            for _ in range(rounds)
        ]
        median = statistics.median(us for us, _ in results)
        shown = ", ".join(f"{us:.1f}" for us, _ in results)
        print(f"{path}: {median:.1f} us of processor per token ({shown}), {results[0][1]:.2f} events per token")


if __name__ == "__main__":
    run(main)
