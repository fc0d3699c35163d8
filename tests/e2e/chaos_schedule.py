"""What goes wrong when, drawn from a seed."""

import random
from dataclasses import dataclass
from enum import Enum

PREFILL_NODES = ("prefill-shm", "prefill-tcp")
DECODE_NODES = ("decode-0", "decode-1")
"""One of them always lives."""


class Action(Enum):
    KILL = "SIGKILL, started again later"
    TERMINATE = "SIGTERM, started again later"
    STOP = "SIGSTOP, SIGCONT later"
    DEAFEN = "hears nobody for a while"


@dataclass(frozen=True)
class Fault:
    """`at` and `lasts` are in seconds, `at` from the start."""

    at: float
    action: Action
    node: str
    lasts: float


_LASTS = {
    # Longer than a silence of 3 s, after which a node is passed over, in some cases and shorter in others.
    Action.STOP: (0.5, 6.0),
    Action.DEAFEN: (0.5, 4.0),
    Action.KILL: (0.0, 2.0),
    Action.TERMINATE: (0.0, 2.0),
}
_DECK = (
    *((action, node) for node in PREFILL_NODES for action in (Action.STOP, Action.STOP, Action.DEAFEN, Action.KILL)),
    *((action, node) for node in DECODE_NODES for action in (Action.STOP, Action.DEAFEN, Action.KILL)),
)
_GAP_S = (0.5, 5.0)
_RESTART_S = 8.0
"""About what a process takes to start: nothing else is done to it meanwhile."""
_QUIET_S = 5.0
"""At the end nothing begins, so that what is under way ends in time."""


def schedule(seed: int, seconds: float) -> list[Fault]:
    """Faults for so many seconds, dealt like a deck of cards, so that every kind comes; one at a time per
    prefill node, and one at a time of all decode nodes."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    deck: list[tuple[Action, str]] = []
    busy_until = dict.fromkeys((*PREFILL_NODES, *DECODE_NODES), 0.0)
    at = 0.0
    while True:
        deck = deck or rng.sample(_DECK, len(_DECK))
        action, node = deck.pop()
        if action is Action.KILL and rng.random() < 0.3:
            action = Action.TERMINATE
        at = max(at + rng.uniform(*_GAP_S), busy_until[node])
        if at > seconds - _QUIET_S:
            return faults
        lasts = rng.uniform(*_LASTS[action])
        faults.append(Fault(at, action, node, lasts))
        until = at + lasts + (_RESTART_S if action in (Action.KILL, Action.TERMINATE) else 1.0)
        busy_until |= dict.fromkeys(DECODE_NODES if node in DECODE_NODES else (node,), until)
