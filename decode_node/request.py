"""A request at the decode node, which owns it, and the states that it passes through."""

import time
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from control.messages import FinishReason, Generate, Peer
from engine.convert import sampling_params
from engine.sampling import SamplingParams
from hisparse.extents import HostSlots


class State(Enum):
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
    State.WAITING: {State.PREFILLING, State.LOCAL_PREFILL, State.FINISHED},
    State.PREFILLING: {State.LANDED, State.WAITING, State.FINISHED},
    State.LOCAL_PREFILL: {State.STAGING, State.WAITING, State.FINISHED},
    State.STAGING: {State.LANDED, State.WAITING, State.FINISHED},
    State.LANDED: {State.RUNNING, State.WAITING, State.FINISHED},
    State.RUNNING: {State.RETRACTED, State.WAITING, State.FINISHED},
    State.RETRACTED: {State.RUNNING, State.WAITING, State.FINISHED},
    State.FINISHED: set(),
}


@dataclass(eq=False)
class Request:
    """`generated` are the ids streamed so far. Every token but the last of prompt + generated has its KV stored."""

    generate: Generate
    gateway: Peer
    arrived: float = field(default_factory=time.monotonic)
    state: State = State.WAITING
    epoch: int = 0
    prefill_attempts: int = 0
    tried: set[str] = field(default_factory=set)
    again_at: float = 0.0
    """When a node that has failed it may be asked again (time.monotonic)."""
    host_slots: HostSlots | None = None
    generated: list[int] = field(default_factory=list)
    last_token_at: float = 0.0

    @cached_property
    def sampling(self) -> SamplingParams:
        """How its tokens are drawn; asked for in every step."""
        return sampling_params(self.generate.sampling)

    @property
    def request_id(self) -> str:
        return self.generate.request_id

    @property
    def key(self) -> tuple[str, int]:
        """What fences writes of the current prefill attempt."""
        return self.request_id, self.epoch

    @property
    def tokens(self) -> tuple[int, ...]:
        """Prompt and generated ids: what a prefill has to compute if it starts now."""
        return self.generate.prompt_ids + tuple(self.generated)

    @property
    def num_tokens(self) -> int:
        return len(self.generate.prompt_ids) + len(self.generated)

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV is stored once the prompt has landed: all but the newest, which the next step computes."""
        return self.num_tokens - 1

    @property
    def most_kv_tokens(self) -> int:
        """Host slots that it can come to need."""
        return len(self.generate.prompt_ids) + self.generate.max_new_tokens - 1

    def move(self, to: State) -> None:
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
