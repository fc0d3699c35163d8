"""Starts waiting requests: what is cached of them, host slots for the rest, and a node that prefills it."""

import time
from collections.abc import Callable

from base.block_hashes import BLOCK_TOKENS
from base.metrics import Metrics
from control.messages import Peer
from decode_node.local_prefill import LocalPrefill
from decode_node.remote_prefill import RemotePrefill
from decode_node.request import Request, RequestState, RequestTable
from decode_node.slots import SlotManager
from kvcache.extents import NO_SLOTS

PrefillNode = Peer | LocalPrefill


class PrefillStarter:
    """The scheduler's policy of prefill: requests start in their order, as far as there are host slots.

    landed: called with a request that needs no prefill, since its KV is cached whole, and how many tokens that are.
    """

    def __init__(
        self,
        slots: SlotManager,
        remote: RemotePrefill,
        local: LocalPrefill | None,
        metrics: Metrics,
        landed: Callable[[Request, int], None],
    ) -> None:
        self._slots = slots
        self._remote = remote
        self._local = local
        self._metrics = metrics
        self._landed = landed

    def start(self, requests: RequestTable) -> None:
        """Start waiting requests, in order, until one has to wait for host slots.

        Of a group one is prefilled. The others wait for that, and share its prompt. One that needs log probabilities of
        its prompt is prefilled by itself.
        """
        waiting = requests.in_state(RequestState.WAITING)
        donors = requests.donors() if waiting else {}
        for request in waiting:
            shares = not request.generated and not request.lacks_logprobs
            donor = donors.get(request.generate.group) if shares else None
            if donor is not None and not donor.has_kv:
                continue
            node = self._choose(request)
            if node is None and donor is None and request.kv_tokens % BLOCK_TOKENS:
                # Nobody can prefill this one now, but perhaps a shorter prompt. It cannot be cached whole.
                continue
            if not self._start(request, node, donor):
                return
            if request.generate.group and request.state is not RequestState.WAITING:
                donors.setdefault(request.generate.group, request)

    def _choose(self, request: Request) -> PrefillNode | None:
        """Who would prefill a request now, or None."""
        node = self._remote.nodes.choose(request)
        if node is None:
            return self._local if self._local is not None and self._local.fits(request.kv_tokens) else None
        return None if node.boot_id in request.tried and time.monotonic() < request.again_at else node

    def _start(self, request: Request, node: PrefillNode | None, donor: Request | None) -> bool:
        """Have the node prefill what is not cached. False if that has to wait for host slots.

        donor: a request with the same prompt, whose KV is there.
        """
        if node is not None and donor is None and self._slots.must_wait(request):
            return False
        prefix = self._slots.hold_prompt(request, donor) if donor else self._slots.hold_prefix(request)
        missing = request.kv_tokens - len(prefix)
        if missing and node is None:
            self._slots.release(request)
            return True
        # A prompt of one token needs no slots, and so no room.
        slots = self._slots.reserve_host(request, missing) if request.kv_tokens else NO_SLOTS
        if slots is None:
            self._slots.release(request)
            return False
        self._metrics.prefix_cache_queries.labels("decode").inc(request.kv_tokens)
        self._metrics.prefix_cache_hits.labels("decode").inc(len(prefix))
        if not missing:
            request.move(RequestState.LANDED)
            self._landed(request, len(prefix))
        elif isinstance(node, LocalPrefill):
            request.host_slots = prefix.extend(slots.extents)
            node.start(request, len(prefix))
        elif node is not None:
            self._remote.dispatch(request, node, slots)
        return True
