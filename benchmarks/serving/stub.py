"""`python -m benchmarks.serving.stub`: a service that computes nothing, to see what a client can take."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Annotated, Any

import typer

from base.errors import StartupError
from benchmarks.program import run
from cli.serve import LOOPBACK, bind_error
from service.lifecycle import raise_file_limit

MODEL = "stub"
Json = dict[str, Any]


class Reply:
    """The answer to one request: events in chunks after `start`, or a whole body."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def start(self) -> None:
        self._writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def event(self, content: Json | str | bytes) -> None:
        """One server-sent event: a JSON object or its text."""
        text = json.dumps(content).encode() if isinstance(content, dict) else content
        self.chunk(b"data: %b\n\n" % (text.encode() if isinstance(text, str) else text))

    def chunk(self, data: bytes) -> None:
        """Bytes of the body, as they are."""
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        self._writer.write(b"0\r\n\r\n")

    def whole(self, status: int, content: Json) -> None:
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        self._writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    def drop(self) -> None:
        """Close the connection, whatever has been said."""
        self._writer.transport.abort()


Answer = Callable[[Json, Reply], Awaitable[None]]
"""Answers a completion request, given its body."""


async def serve(answer: Answer, port: int = 0) -> asyncio.Server:
    """Listen on the loopback interface for HTTP/1.1: `/v1/models`, and everything else by `answer`."""

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(head.partition(b"content-length:")[2].split(b"\r\n", 1)[0] or 0)
                body = await reader.readexactly(length)
                reply = Reply(writer)
                if head.startswith(b"get /v1/models"):
                    reply.whole(200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
                    continue
                try:
                    request = json.loads(body)
                    is_request = "prompt" in request and int(request["max_tokens"]) >= 0
                except (ValueError, KeyError, TypeError):
                    is_request = False
                if is_request:
                    await answer(request, reply)
                else:
                    reply.whole(400, {"error": {"message": "expected a completion request with prompt and max_tokens"}})
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, ValueError):
            writer.close()

    return await asyncio.start_server(connection, LOOPBACK, port)


def token_event(text: str = "x", **fields: object) -> Json:
    """A chunk with one token, as the services that speak this API write it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **fields}
    head = {"id": "cmpl-8f14e45fceea167a5a36dedd4bea2543", "object": "text_completion", "created": 1767225600}
    return {**head, "model": MODEL, "choices": [choice], "usage": None}


def usage_event(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None = None) -> Json:
    """cached_tokens: None leaves them out."""
    tokens = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    usage: Json = {**tokens, "total_tokens": sum(tokens.values())}
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return {**token_event(), "choices": [], "usage": usage}


class Steps:
    """Gives every answer under way one token at a time, all of them together, as a decode batch does.

    One timer for all: one for each would cost more than the event that it sends.
    """

    def __init__(self, interval: float) -> None:
        """interval: seconds from step to step, as long as this process keeps up."""
        self._interval = interval
        self._left: dict[Reply, int] = {}
        """Tokens to come."""
        self._ended: dict[Reply, asyncio.Event] = {}
        self._stepping: asyncio.Task[None] | None = None

    async def answer(self, request: Json, reply: Reply) -> None:
        """As many tokens as were asked for."""
        if self._stepping is None:
            self._stepping = asyncio.create_task(self._step())
        reply.start()
        if request["max_tokens"]:
            self._left[reply], self._ended[reply] = request["max_tokens"], asyncio.Event()
            await self._ended[reply].wait()
            del self._ended[reply]
        reply.event(usage_event(len(request["prompt"]), request["max_tokens"]))
        reply.event("[DONE]")
        reply.end()

    async def _step(self) -> None:
        token = json.dumps(token_event()).encode()
        clock = asyncio.get_running_loop()
        due = clock.time()
        while True:
            due = max(due + self._interval, clock.time())
            await asyncio.sleep(due - clock.time())
            for reply in list(self._left):
                reply.event(token)
                self._left[reply] -= 1
                if not self._left[reply]:
                    del self._left[reply]
                    self._ended[reply].set()


def main(
    port: Annotated[int, typer.Option(min=0, max=65535)] = 9000,
    interval_ms: Annotated[float, typer.Option(min=0, help="From one token of every answer to the next.")] = 10.0,
) -> None:
    """Serve until interrupted."""
    raise_file_limit()
    if error := bind_error(LOOPBACK, port):
        raise StartupError(f"--port {port}: cannot listen at {LOOPBACK} ({error.strerror})") from error

    async def forever() -> None:
        server = await serve(Steps(interval_ms / 1e3).answer, port)
        print(f"stub: http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
        await server.serve_forever()

    asyncio.run(forever())


if __name__ == "__main__":
    run(main)
