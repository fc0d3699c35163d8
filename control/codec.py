"""Control messages on the wire.

A frame is one msgpack map: protocol version, kind, sender, addressee and body. Whatever is not such a frame raises
`MalformedMessage`, which the control plane counts and drops.
"""

from typing import Annotated, Literal

import msgpack
from pydantic import Field, ValidationError

from control.messages import SENT_BY, Message, Peer, WireModel

PROTOCOL_VERSION = 4


class MalformedMessage(ValueError):
    """A frame that is not a valid control message."""


class Frame(WireModel):
    """A message with its sender and the boot it is meant for; an empty `to` means whoever has the address."""

    v: Literal[4]
    kind: str
    sender: Peer
    to: Annotated[str, Field(max_length=128)] = ""
    body: dict[str, object]


def encode(message: Message, sender: Peer, to: str = "") -> bytes:
    """One frame. `to` is the boot id that may act on it."""
    frame = {
        "v": PROTOCOL_VERSION,
        "kind": type(message).__name__,
        "sender": sender.model_dump(),
        "to": to,
        "body": message.model_dump(exclude_defaults=True),
    }
    packed: bytes = msgpack.packb(frame)
    return packed


def decode(data: bytes) -> tuple[Peer, str, Message]:
    """Sender, addressed boot id and message of a frame.

    Raises MalformedMessage for anything that is not a well-formed frame of this protocol version.
    """
    try:
        frame = Frame.model_validate(msgpack.unpackb(data, use_list=False, strict_map_key=True))
        kind = Message.kinds.get(frame.kind)
        if kind is None:
            raise MalformedMessage(f"unknown message kind {frame.kind[:64]!r}")
        if kind not in SENT_BY[frame.sender.role]:
            raise MalformedMessage(f"a {frame.sender.role} process does not send {frame.kind}")
        return frame.sender, frame.to, kind.model_validate(frame.body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise MalformedMessage(f"{error.title}: {place}: {first['msg']}") from error
    except MalformedMessage:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise MalformedMessage(f"not a msgpack frame: {error}") from error
