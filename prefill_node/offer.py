"""Which requests a prefill node accepts, and which destinations."""

from dataclasses import dataclass

from base.tombstones import LatestDict
from control.messages import Destination, ModelIdentity, Peer, PrefillRequest
from control.prompt_logprobs import too_many
from transfer.choices import Transport


@dataclass(frozen=True)
class Offer:
    """What a prefill node offers. max_tokens: the longest prompt that it takes. ranks: boot ids of its other ranks."""

    identity: ModelIdentity
    transports: tuple[Transport, ...]
    max_tokens: int
    vocab_size: int
    ranks: tuple[str, ...] = ()

    def rejection_reason(self, request: PrefillRequest) -> str | None:
        """Why the node cannot serve a request, naming both values, or None."""
        destination = request.destination
        num_tokens = len(request.token_ids)
        expected = self.identity.num_layers * (self.identity.item_bytes,)
        expected += self.identity.num_index_layers * (self.identity.index_key_bytes,)
        if not request.hisparse:
            return "hisparse=false: this node does not write KV to resident device pages"
        if missing := set(self.ranks) - set(request.ranks):
            return f"the slots are not reserved for ranks {', '.join(sorted(missing))} of this node"
        if difference := self.identity.differences(destination.identity):
            return f"model mismatch, prefill != decode: {difference}"
        if not set(self.transports) & set(destination.transports):
            here, there = "|".join(self.transports), "|".join(destination.transports)
            return f"no transport in common: {here} here, {there} at the decode node"
        if destination.buffers.item_lengths != expected:
            return f"destination item lengths {destination.buffers.item_lengths} != {expected}"
        if num_tokens > self.max_tokens:
            return f"prompt of {num_tokens} tokens; this node takes up to {self.max_tokens}"
        largest = max(*request.token_ids, request.last_token_id)
        if largest >= self.vocab_size:
            return f"token id {largest} is outside the vocabulary of {self.vocab_size}"
        return None if request.prompt_logprobs is None else too_many(num_tokens, request.prompt_logprobs)


class Destinations:
    """The pools that decode processes named in their first requests.

    A process keeps its pools, and the ways to reach them, as long as it lives. So nothing is written for a message in
    its name that names others.
    """

    def __init__(self, limit: int = 4096) -> None:
        """limit: processes that are remembered, the last ones."""
        self._of_boot: LatestDict[str, Destination] = LatestDict(limit)

    def rejection_reason(self, decode: Peer, named: Destination) -> str | None:
        """How a destination differs from the one that the process offered first, or None. The first call counts."""
        known = self._of_boot[decode.boot_id] = self._of_boot.get(decode.boot_id, named)
        differing = [name for name in Destination.model_fields if getattr(known, name) != getattr(named, name)]
        if not differing:
            return None
        return f"{decode.address} offered another destination before: {', '.join(differing)} changed"
