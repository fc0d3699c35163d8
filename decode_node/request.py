"""A request at the decode node, which owns it, and the states that it passes through."""

import time
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from control.messages import AttemptId, FinishReason, Generate, Peer
from engine.sampling import RandomStream
from hisparse.extents import HostSlots


class RequestState(Enum):
    """Where a request is, and with that who holds its host slots."""

    WAITING = "waiting"
    """It holds nothing and waits for host slots and a place to be prefilled."""
    PREFILLING = "prefilling"
    """A prefill node may be writing to its slots: the reservation table holds them."""
    LOCAL_PREFILL = "local_prefill"
    """This node computes its prompt; the request holds its slots."""
    STAGING = "staging"
    """Its prompt is being copied from device pages to its slots: the coordinator holds them."""
    LANDED = "landed"
    """Its KV is complete in host memory; the request holds its slots and waits for device slots."""
    RUNNING = "running"
    """It decodes: the coordinator holds its slots."""
    RETRACTED = "retracted"
    """It gave its device slots up; its KV is complete in host memory and the request holds its slots."""
    FINISHED = "finished"
    """Nothing is held for it."""


_NEXT = {
    RequestState.WAITING: {
        RequestState.PREFILLING,
        RequestState.LOCAL_PREFILL,
        RequestState.LANDED,
        RequestState.FINISHED,
    },
    RequestState.PREFILLING: {RequestState.LANDED, RequestState.WAITING, RequestState.FINISHED},
    RequestState.LOCAL_PREFILL: {RequestState.STAGING, RequestState.WAITING, RequestState.FINISHED},
    RequestState.STAGING: {RequestState.LANDED, RequestState.WAITING, RequestState.FINISHED},
    RequestState.LANDED: {RequestState.RUNNING, RequestState.WAITING, RequestState.FINISHED},
    RequestState.RUNNING: {RequestState.RETRACTED, RequestState.WAITING, RequestState.FINISHED},
    RequestState.RETRACTED: {RequestState.RUNNING, RequestState.WAITING, RequestState.FINISHED},
    RequestState.FINISHED: set(),
}


@dataclass(eq=False)
class Request:
    """`generated` are the ids streamed so far. Every token but the last of prompt + generated has its KV stored.

    `launched`: tokens that steps were launched for, those included that are not read yet.
    """

    generate: Generate
    gateway: Peer
    arrived: float = field(default_factory=time.monotonic)
    state: RequestState = RequestState.WAITING
    epoch: int = 0
    prefill_attempts: int = 0
    tried: set[str] = field(default_factory=set)
    again_at: float = 0.0
    """When a node that has failed it may be asked again (time.monotonic)."""
    host_slots: HostSlots | None = None
    generated: list[int] = field(default_factory=list)
    launched: int = 0
    last_token_at: float = 0.0

    @cached_property
    def random(self) -> RandomStream:
        """The numbers by which its tokens are drawn."""
        return RandomStream(self.generate.sampling.seed)

    @property
    def request_id(self) -> str:
        return self.generate.request_id

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and generated ids. The KV of all but the last is prefilled; a decode step computes the last."""
        return self.generate.prompt_ids + tuple(self.generated)

    @property
    def newest_token(self) -> int:
        return self.generated[-1] if self.generated else self.generate.prompt_ids[-1]

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is stored once it has landed: all but the newest, which the next step computes."""
        return len(self.generate.prompt_ids) + len(self.generated) - 1

    @property
    def most_kv_tokens(self) -> int:
        """Host slots that it can come to need."""
        return len(self.generate.prompt_ids) + self.generate.max_new_tokens - 1

    @property
    def wants_step(self) -> bool:
        """Whether it gets another token after those that steps were launched for, unless one of these ends it."""
        return self.launched < self.generate.max_new_tokens

    def attempt(self, decode: str) -> AttemptId:
        """Its latest prefill attempt. decode: the boot id of this node."""
        return AttemptId(decode, self.request_id, self.epoch)

    def move(self, to: RequestState) -> None:
        """The only way in which the state changes. Raises RuntimeError if `to` cannot follow."""
        if to not in _NEXT[self.state]:
            raise RuntimeError(f"request {self.request_id} is {self.state.value} and cannot become {to.value}")
        self.state = to

    def finish_reason(self) -> FinishReason | None:
        """Why the newest token ends the request, or None."""
        if self.generated[-1] in self.generate.stop_token_ids:
            return "stop"
        if len(self.generated) >= self.generate.max_new_tokens:
            return "length"
        return None
