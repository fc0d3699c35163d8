"""WebSockets of /v1/responses: each message asks for a response, as the body of a POST does.

A turn is a POST that goes through the whole application: key, limits, line in the log, metrics, events and aborts are
HTTP's. Here events become messages, and the last conversation is kept for `previous_response_id`.
"""

import asyncio
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.admission import RequestBytes
from gateway.answers.streamed import encode_json
from gateway.errors import ApiError, shown
from gateway.held_answers import HeldAnswers, HeldBytes
from gateway.requests.responses import ResponseCreate
from service.websocket import GuardedWebSocket

MAX_AGE_S = 3600.0
"""After which a connection closes, as Open Responses has it."""
_MOST_WAITING = 16
"""Messages that may wait while another one is answered."""
_OWN_HEADERS = (b"content-type", b"content-length", b"x-request-id")
"""Those of the handshake that a turn does not have."""
_DONE = (b"event: response.completed\n", b"event: response.incomplete\n")


@dataclass(frozen=True)
class Conversation:
    """The last response of a connection. items: JSON of the input that led to it. done: its last event."""

    response_id: str
    items: bytes
    done: bytes

    def all_items(self) -> bytes:
        """JSON of input and output."""
        return _joined(self.items, encode_json(orjson.loads(self.done)["response"]["output"]))


class Turn:
    """One message, as the POST that it becomes. The scope of that has it as "turn"."""

    def __init__(self, websocket: WebSocket, message: bytes, left: asyncio.Event, earlier: Conversation | None) -> None:
        """left: set once the client has left. earlier: what the message may continue."""
        self._websocket = websocket
        self._unread: bytes | None = message
        self._left = left
        self._earlier = earlier
        self.response_id = ""
        self.continues = False
        """Whether the message names the earlier response."""
        self._items = b""
        self._status = 0
        self._done = b""
        self.closes = False
        """Whether the connection is to be closed after it, since the gateway stops."""

    def body(self, asked: ResponseCreate) -> bytes:
        """The body of the POST, with the whole conversation. Raises ApiError. Any thread may call it."""
        items = encode_json(asked.items)
        if (wanted := asked.previous_response_id) is not None:
            if self._earlier is None or self._earlier.response_id != wanted:
                text = (
                    f"previous_response_id: the response {shown(wanted)} is not found: only the last one of this "
                    "connection is kept. Send the whole conversation instead."
                )
                raise ApiError(400, text, param="previous_response_id", code="previous_response_not_found")
            self.continues = True
            items = _joined(self._earlier.all_items(), items)
        self._items = items
        return b'%b,"input":%b}' % (encode_json({**asked.others, "stream": True})[:-1], items)

    @property
    def conversation(self) -> Conversation | None:
        """What the next message may continue; None if the turn has failed."""
        return Conversation(self.response_id, self._items, self._done) if self._done else None

    async def receive(self) -> Message:
        body, self._unread = self._unread, None
        if body is None:
            await self._left.wait()
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        """Send events, or the error that is answered instead, unless the client has left."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self.closes = (b"connection", b"close") in message["headers"]
        elif self._left.is_set():
            pass
        elif self._status != 200:
            error = orjson.loads(message["body"])["error"]
            await self._send(error_event(self._status, error))
        else:
            for event in message["body"].split(b"\n\n")[:-1]:
                data = event.partition(b"\ndata: ")[2]
                if event.startswith(_DONE):
                    self._done = data
                await self._send(data)

    async def _send(self, data: bytes) -> None:
        try:
            await self._websocket.send_text(data.decode())
        except WebSocketDisconnect:
            self._left.set()


class OpenSockets:
    """All open WebSockets. Where they are too many, an idle one closes: of the client that has most, the longest idle.

    conversations: counts what they keep. Where that is too much, the largest is forgotten.
    """

    def __init__(self, most: int, conversations: HeldAnswers) -> None:
        self._most = most
        self.conversations = conversations
        self._open: set[ResponseSocket] = set()

    def add(self, socket: "ResponseSocket") -> None:
        self._open.add(socket)
        if len(self._open) > self._most:
            counts = Counter(each.client for each in self._open)
            idle = [each for each in self._open if each.idle]
            given_up = max(idle, key=lambda each: (counts[each.client], -each.idle_since), default=socket)
            self.discard(given_up)
            given_up.connection.fail("too_many_websockets", 1013, "this gateway has as many WebSockets as it may")

    def discard(self, socket: "ResponseSocket") -> None:
        self._open.discard(socket)


class ResponseSocket:
    """One WebSocket, and the conversation that it keeps."""

    def __init__(self, websocket: WebSocket, sockets: OpenSockets) -> None:
        scope = websocket.scope
        self.client: bytes = scope["key"]
        self.connection: GuardedWebSocket = scope["socket"]
        self.idle = True
        self.idle_since = time.monotonic()
        self._websocket = websocket
        self._sockets = sockets
        self._left = asyncio.Event()
        self._messages: asyncio.Queue[tuple[bytes, RequestBytes] | None] = asyncio.Queue()
        """The last one is None."""
        self._arriving: RequestBytes = scope["account"]()
        self._conversation: Conversation | None = None
        self._kept: HeldBytes | None = None
        """What the conversation counts."""
        self._turns = 0

    async def serve(self) -> None:
        """Answer messages until the client leaves, or the connection is too old."""
        self.connection.takes = self._takes
        await self._websocket.accept()
        self._sockets.add(self)
        reading = asyncio.create_task(self._read())
        try:
            await self._answer()
        except WebSocketDisconnect:
            # The client left while it was told something.
            pass
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            self._sockets.discard(self)
            self._forget()
            self._arriving.close()
            while not self._messages.empty():
                if (waiting := self._messages.get_nowait()) is not None:
                    waiting[1].close()

    async def _read(self) -> None:
        """Queue messages, also while one is answered: so a client that leaves is noticed."""
        while (event := await self._websocket.receive())["type"] == "websocket.receive":
            message: bytes = event["bytes"]
            if not self._takes(len(message)):
                self.connection.fail(None, 1013, "too many bytes of requests are held: try again later")
            elif self._messages.qsize() >= _MOST_WAITING:
                self.connection.fail("too_many_messages", 1008, "too many messages wait: wait for their responses")
            else:
                self._messages.put_nowait((message, self._arriving))
                self._arriving = self._websocket.scope["account"]()
        self._left.set()
        self._messages.put_nowait(None)

    def _takes(self, size: int) -> bool:
        """Whether there is room for so many bytes of the message that arrives."""
        try:
            self._arriving.body(size)
        except ApiError:
            return False
        return True

    async def _answer(self) -> None:
        ends = time.monotonic() + MAX_AGE_S
        while True:
            try:
                async with asyncio.timeout(ends - time.monotonic()):
                    waiting = await self._messages.get()
            except TimeoutError:
                text = "the connection is as old as it may become: open another one"
                error = {"type": "invalid_request_error", "code": "websocket_connection_limit_reached", "message": text}
                await self._websocket.send_text(error_event(400, error).decode())
                await self._websocket.close()
                return
            if waiting is None:
                return
            message, counted = waiting
            # From here on it counts as a body.
            counted.close()
            if self._left.is_set():
                return
            self.idle, self.connection.busy = False, True
            turn = await self._turn(message)
            self.idle, self.connection.busy = True, False
            self.idle_since = time.monotonic()
            if turn.closes or self.connection.stopping:
                await self._websocket.close(1012)
                return

    async def _turn(self, message: bytes) -> Turn:
        scope = self._websocket.scope
        self._turns += 1
        headers = [header for header in scope["headers"] if header[0] not in _OWN_HEADERS]
        own = (
            b"application/json",
            b"%d" % len(message),
            b"%b-%d" % (scope["access"].http_request_id.encode(), self._turns),
        )
        post = {**scope, "type": "http", "method": "POST", "headers": [*headers, *zip(_OWN_HEADERS, own, strict=True)]}
        turn = Turn(self._websocket, message, self._left, self._conversation)
        await scope["served_by"]({**post, "turn": turn}, turn.receive, turn.send)
        if (conversation := turn.conversation) is not None:
            self._keep(conversation)
        elif turn.continues:
            self._forget()
        return turn

    def _keep(self, conversation: Conversation) -> None:
        """Keep it instead of the last one, if it is not too large."""
        self._forget()
        kept = self._sockets.conversations.account()
        try:
            kept.take(len(conversation.items) + len(conversation.done))
        except ApiError:
            kept.close()
        else:
            self._conversation, self._kept = conversation, kept
            kept.abort = self._forget

    def _forget(self) -> None:
        if self._kept is not None:
            self._kept.close()
        self._conversation = self._kept = None


def error_event(status: int, error: dict[str, Any]) -> bytes:
    """The event of an error. Its code is never missing here."""
    return encode_json({"type": "error", "status": status, "error": {**error, "code": error["code"] or error["type"]}})


def _joined(*lists: bytes) -> bytes:
    """JSON of one list of the elements of all."""
    return b"[%b]" % b",".join(each[1:-1] for each in lists if each != b"[]")
