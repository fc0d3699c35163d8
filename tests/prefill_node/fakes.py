"""Stand-ins for what surrounds a prefill node: a model that computes nothing, a control plane that records."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from control.liveness import AnsweredPing
from control.messages import Message, Output, Outputs, Peer
from kvcache.layout import KVLayout
from model.passes import PrefillChunk
from model.sparse_model import TokenLogprobs

LAYOUT = KVLayout(index_layer_of=(0, 0), item_bytes=16, index_key_bytes=8)


ME = Peer(role="decode", address="127.0.0.1:9", boot_id="decode")


class FakeModel:
    """Writes each position's number into its rows."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[int, int]]] = []

    def prefill(self, chunks: Sequence[PrefillChunk], on_layer: Callable[[int], None], kv_only: bool) -> torch.Tensor:
        """Hidden states: of each token its position."""
        self.calls.append([(chunk.start, len(chunk.token_ids)) for chunk in chunks])
        for layer in range(LAYOUT.num_layers):
            for chunk in chunks:
                rows = chunk.cache.rows(chunk.start, chunk.stop)
                chunk.cache.kv(layer)[rows] = torch.arange(chunk.start, chunk.stop).to(torch.uint8)[:, None]
            on_layer(layer)
        return torch.cat([torch.arange(chunk.start, chunk.stop) for chunk in chunks]).float()[:, None]

    def logprobs(self, hidden: torch.Tensor, next_ids: torch.Tensor, count: int) -> TokenLogprobs:
        """Of each token minus its position; its rank is its id."""
        own = -hidden[:, 0] - 1
        top = torch.zeros((len(hidden), count))
        return TokenLogprobs(own, next_ids.int(), top, top.int())


MessageT = TypeVar("MessageT", bound=Message)


@dataclass
class FakeControl:
    """Records what is sent; repeated messages are kept under their keys until answered."""

    me: Peer = ME
    sent: list[tuple[Peer, Message]] = field(default_factory=list)
    repeated: dict[Hashable, tuple[Peer, Message]] = field(default_factory=dict)
    watched: set[Peer] = field(default_factory=set)
    heard: dict[str, float] = field(default_factory=dict)
    alive: dict[str, float] = field(default_factory=dict)
    answers: dict[str, AnsweredPing] = field(default_factory=dict)
    revoked: set[str] = field(default_factory=set)

    def send(self, to: Peer, message: Message | Callable[[], Message], *, any_boot: bool = False) -> None:
        self.sent.append((to, message if isinstance(message, Message) else message()))

    def repeat(
        self, key: Hashable, to: Peer, message: Message, *, every: float = 0.5, give_up_after: float = math.inf
    ) -> None:
        self.repeated[key] = (to, message)

    def answered(self, key: Hashable) -> None:
        self.repeated.pop(key, None)

    def watch(self, peers: set[Peer]) -> None:
        self.watched = set(peers)

    def last_heard(self, boot_id: str) -> float | None:
        return self.heard.get(boot_id)

    def alive_after(self, boot_id: str) -> float | None:
        return self.alive.get(boot_id)

    def answer_at(self, address: str) -> AnsweredPing | None:
        return self.answers.get(address)

    def check(self) -> None:
        pass

    def is_revoked(self, peer: Peer) -> bool:
        return peer.boot_id in self.revoked

    def periodically(self, every: float, action: Callable[[], None]) -> None:
        raise AssertionError("nothing here is periodic")

    def outputs(self) -> list[Output]:
        """What was streamed, also what is repeated until its gateway has heard that it ends a request."""
        repeated = [message for key, (_, message) in list(self.repeated.items())]
        messages = [*(message for _, message in list(self.sent)), *repeated]
        return [output for message in messages if isinstance(message, Outputs) for output in message.rows()]

    def take(self, kind: type[MessageT]) -> list[MessageT]:
        """Messages of a kind sent since the last call."""
        taken = [message for _, message in self.sent if isinstance(message, kind)]
        self.sent = [pair for pair in self.sent if not isinstance(pair[1], kind)]
        return taken
