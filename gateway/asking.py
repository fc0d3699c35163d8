"""Choices of one prompt that begin together: each node that takes some of them is asked for these by one message."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from control.messages import FurtherChoice, Generate, Peer


@dataclass(eq=False, slots=True)
class Asking:
    """A message for a node. unanswered: the requests of it that the node has not answered, by id."""

    node: Peer
    unanswered: dict[str, Generate] = field(default_factory=dict)
    key: tuple[str, str, str] | None = None
    """Of the message, once it is sent and repeated."""

    def message(self) -> Generate:
        """What the node is told, but for the prefill nodes."""
        # The first of a message is the one that may ask for the log probabilities of the prompt.
        requests = sorted(self.unanswered.values(), key=lambda generate: generate.prompt_logprobs is None)
        further = tuple(FurtherChoice(request_id=one.request_id, seed=one.sampling.seed) for one in requests[1:])
        return requests[0].model_copy(update={"further": further})

    def answered(self, request_id: str) -> bool:
        """Note an answer. Whether it was the last one that was missing."""
        return self.unanswered.pop(request_id, None) is not None and not self.unanswered


@dataclass(eq=False, slots=True)
class Beginning:
    """The choices of one prompt that begin together.

    cached: by boot id, how many tokens of the prompt nodes have; looked up once for all choices.
    """

    cached: Mapping[str, int]
    by_node: dict[str, Asking] = field(default_factory=dict)
    """By boot id."""

    def add(self, node: Peer, generate: Generate) -> Asking:
        """Have the node asked for a request, too."""
        asking = self.by_node.setdefault(node.boot_id, Asking(node))
        asking.unanswered[generate.request_id] = generate
        return asking
