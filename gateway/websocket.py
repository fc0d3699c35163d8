"""WebSockets of /v1/responses: each message asks for a response, as the body of a POST does.

A turn is a POST that goes through the whole application: key, limits, line in the log, metrics, events and aborts are
HTTP's. Here events become messages, and the last conversation is kept for `previous_response_id`.
"""

import asyncio
import json
import time
from collections import Counter

import orjson
from starlette.types import Message
from starlette.websockets import WebSocket, WebSocketDisconnect

from gateway.admission import RequestBytes
from gateway.answers.streamed import encode_json
from gateway.errors import ApiError, ErrorDetail, shown
from gateway.held_answers import HeldAnswers, HeldBytes
from gateway.requests.responses import ResponseCreate
from service.websocket import GuardedWebSocket

MAX_AGE_S = 3600.0
"""After which a connection closes, as Open Responses has it."""
_OWN_HEADERS = (b"content-type", b"content-length", b"x-request-id")
"""Those of the handshake that a turn does not have."""
_DONE = (b"event: response.completed\n", b"event: response.incomplete\n")


class Turn:
    """One message, as the POST that it becomes. The scope of that has it as "turn"."""

    def __init__(self, websocket: WebSocket, message: bytes, earlier: "Turn | None") -> None:
        """earlier: what the message may continue."""
        self._websocket = websocket
        self._left: asyncio.Event = websocket.scope["socket"].left
        self._unread: bytes | None = message
        self._earlier = earlier
        self.response_id = ""
        self.continues = False
        """Whether the message names the earlier response."""
        self.items = b""
        """JSON of the whole input."""
        self.done = b""
        """The last event, if the turn has not failed."""
        self._status = 0
        self.closes = False
        """Whether the connection is to be closed after it, since the gateway stops."""

    def body(self, asked: ResponseCreate) -> bytes:
        """The body of the POST, with the whole conversation. Raises ApiError. Any thread may call it."""
        items = _as_given(asked.items)
        if (wanted := asked.previous_response_id) is not None:
            if self._earlier is None or self._earlier.response_id != wanted:
                text = (
                    f"previous_response_id: the response {shown(wanted)} is not found: only the last one of this "
                    "connection is kept. Send the whole conversation instead."
                )
                raise ApiError(400, text, param="previous_response_id", code="previous_response_not_found")
            self.continues = True
            output = orjson.loads(self._earlier.done)["response"]["output"]
            items = _joined(self._earlier.items, encode_json(output), items)
        self._earlier, self.items = None, items
        return b'%b,"input":%b}' % (_as_given({**(asked.model_extra or {}), "stream": True})[:-1], items)

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
                    self.done = data
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
        self._clients: dict[GuardedWebSocket, bytes] = {}

    async def serve(self, websocket: WebSocket) -> None:
        """Answer the messages of one until its client leaves, or it is too old."""
        connection: GuardedWebSocket = websocket.scope["socket"]
        counted: RequestBytes = websocket.scope["counted"]
        socket = ResponseSocket(websocket, self.conversations)

        def takes(size: int) -> bool:
            counted.close()
            try:
                counted.body(size)
            except ApiError:
                return False
            return True

        connection.takes = takes
        await websocket.accept()
        self._clients[connection] = websocket.scope["key"]
        self._make_room()
        try:
            await socket.answer()
        except WebSocketDisconnect:
            # The client left while it was told something.
            pass
        finally:
            self._clients.pop(connection, None)
            socket.forget()

    def _make_room(self) -> None:
        if len(self._clients) <= self._most:
            return
        counts = Counter(self._clients.values())
        idle = [each for each in self._clients if not each.busy]
        given_up = max(idle, key=lambda each: (counts[self._clients[each]], -each.idle_since))
        del self._clients[given_up]
        given_up.fail("too_many_websockets", 1013, "this gateway has as many WebSockets as it may")


class ResponseSocket:
    """One WebSocket, and the conversation that it keeps."""

    def __init__(self, websocket: WebSocket, conversations: HeldAnswers) -> None:
        self._websocket = websocket
        self._left: asyncio.Event = websocket.scope["socket"].left
        self._conversations = conversations
        self._last: Turn | None = None
        """The one that the next message may continue."""
        self._kept: HeldBytes | None = None
        """What that counts."""
        self._turns = 0

    async def answer(self) -> None:
        ends = time.monotonic() + MAX_AGE_S
        while True:
            try:
                async with asyncio.timeout(ends - time.monotonic()):
                    event = await self._websocket.receive()
            except TimeoutError:
                text = "the connection is as old as it may become: open another one"
                error = ApiError(400, text, code="websocket_connection_limit_reached")
                await self._websocket.send_text(error_event(error.status, error.body()["error"]).decode())
                await self._websocket.close()
                return
            if event["type"] == "websocket.disconnect" or self._left.is_set():
                return
            turn = await self._turn(event["bytes"])
            if turn.closes:
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
        turn = Turn(self._websocket, message, self._last)
        await scope["served_by"]({**post, "turn": turn}, turn.receive, turn.send)
        if turn.done:
            self._keep(turn)
        elif turn.continues:
            self.forget()
        return turn

    def _keep(self, turn: Turn) -> None:
        """Keep it instead of the last one, if it is not too large."""
        self.forget()
        kept = self._conversations.account()
        try:
            kept.take(len(turn.items) + len(turn.done))
        except ApiError:
            kept.close()
        else:
            self._last, self._kept = turn, kept
            kept.abort = self.forget

    def forget(self) -> None:
        if self._kept is not None:
            self._kept.close()
        self._last = self._kept = None


def error_event(status: int, error: ErrorDetail) -> bytes:
    """The event of an error. Its code is never missing here."""
    return encode_json({"type": "error", "status": status, "error": {**error, "code": error["code"] or error["type"]}})


def _as_given(value: object) -> bytes:
    """JSON of what a message has. Numbers that are not finite stay, for the POST to refuse."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _joined(*lists: bytes) -> bytes:
    """JSON of one list of the elements of all."""
    return b"[%b]" % b",".join(each[1:-1] for each in lists if each != b"[]")
