"""Control messages on the wire: one msgpack map per frame, with wire version, kind, sender, addressee and body.

Processes of two wire versions do not work together, but each can tell the other so: "Stable parts" of docs/protocol.md
are the same in every version, and must not change.
"""

from collections.abc import Mapping
from typing import Annotated

import msgpack
from pydantic import Field, ValidationError

from base.wire import UInt, WireModel, first_error
from control.messages import HostPort, Message, Peer, Ping, Pong, Refused, Registered

PROTOCOL_VERSION = 13


class MalformedMessage(ValueError):
    """A frame that is not a valid control message."""


class Frame(WireModel):
    """A message and its sender. to: the boot id that may act on it; empty: any at the address. Stable."""

    v: UInt
    kind: str
    sender: Peer
    to: Annotated[str, Field(max_length=128)] = ""
    body: dict[str, object]


class Greeting(WireModel):
    """The stable part of Register and of Heartbeat."""

    via: HostPort


_STABLE: Mapping[str, type[Message | Greeting]] = {
    "Register": Greeting,
    "Heartbeat": Greeting,
    "Registered": Registered,
    "Refused": Refused,
    "Ping": Ping,
    "Pong": Pong,
}


def encode(message: Message, sender: Peer, to: str = "", version: int = PROTOCOL_VERSION) -> bytes:
    """One frame. Another version than this one is for stable kinds only."""
    kind = type(message).__name__
    if version != PROTOCOL_VERSION and kind not in _STABLE:
        raise ValueError(f"{kind} is not the same in wire version {version}")
    frame = {"v": version, "kind": kind, "sender": sender.model_dump(), "to": to}
    return bytes(msgpack.packb({**frame, "body": message.model_dump(exclude_defaults=True)}))


def decode(data: bytes) -> tuple[Frame, Message | Greeting | None]:
    """A frame and its message; of another wire version the stable part, if there is one. Raises MalformedMessage."""
    try:
        frame = Frame.model_validate(msgpack.unpackb(data, use_list=False, strict_map_key=True))
        is_ours = frame.v == PROTOCOL_VERSION
        kind = (Message.kinds if is_ours else _STABLE).get(frame.kind)
        if kind is None and is_ours:
            raise MalformedMessage(f"unknown message kind {frame.kind[:64]!r}")
        if kind is None:
            return frame, None
        if frame.sender.role not in Message.kinds[frame.kind].sent_by:
            raise MalformedMessage(f"a {frame.sender.role} process does not send {frame.kind}")
        return frame, kind.model_validate(frame.body)
    except ValidationError as error:
        first = first_error(error)
        place = ".".join(map(str, first["loc"]))
        raise MalformedMessage(f"{error.title}: {place}: {first['msg']}") from error
    except MalformedMessage:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise MalformedMessage(f"not a msgpack frame: {error}") from error
