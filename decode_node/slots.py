"""Gives slots to requests, takes them back, and chooses the request that gives way when a pool runs short."""

from dataclasses import dataclass

import structlog

from base.metrics import Metrics
from control.messages import Peer
from decode_node import spans
from decode_node.local_prefill import LocalPrefill
from decode_node.remote_prefill import RemotePrefill
from decode_node.request import Request, RequestState, RequestTable
from hisparse.coordinator import HOST_GRANULE, HiSparseCoordinator, Tier
from kvcache.extents import NO_SLOTS, HostSlots

log = structlog.get_logger(__name__)

_FRESH_S = 10.0
"""Slots whose writer lives leave quarantine within that, also if they wait for a fence."""


@dataclass(frozen=True)
class _Shortage:
    """A request got no slots for the tokens of it that were not cached. Unless more was inserted, it needs no fewer."""

    request_id: str
    num_tokens: int
    insertions: int


class SlotManager:
    """The scheduler's access to host and device slots. The last request gives way; the first never does.

    requests: all requests of the node. The scheduler adds and removes them.
    """

    def __init__(
        self,
        requests: RequestTable,
        coordinator: HiSparseCoordinator,
        remote: RemotePrefill,
        local: LocalPrefill | None,
        metrics: Metrics,
    ) -> None:
        self._requests = requests
        self._coordinator = coordinator
        self._remote = remote
        self._local = local
        self._metrics = metrics
        self._prefixes = coordinator.host.prefixes
        self._shortage: _Shortage | None = None

    def start_prefill(self, request: Request, node: Peer | LocalPrefill | None, donor: Request | None) -> bool:
        """Have the node prefill what is not cached of a waiting request. False if that has to wait for host slots.

        node: None if nobody can; then the request starts only if it is cached whole. donor: a request with the same
        prompt, whose KV is there.
        """
        if node is not None and donor is None and self._must_wait(request):
            return False
        prefix = self._hold_prompt(request, donor) if donor else self._hold_prefix(request)
        missing = request.kv_tokens - len(prefix)
        if missing and node is None:
            self.release(request)
            return True
        # A prompt of one token needs no slots, and so no room.
        slots = self._reserve_host(request, missing) if request.kv_tokens else NO_SLOTS
        if slots is None:
            self.release(request)
            return False
        self._metrics.prefix_cache_queries.labels("decode").inc(request.kv_tokens)
        self._metrics.prefix_cache_hits.labels("decode").inc(len(prefix))
        if not missing:
            request.move(RequestState.LANDED)
            self.landed(request, len(prefix))
        elif isinstance(node, LocalPrefill):
            request.host_slots = prefix.extend(slots.extents)
            node.start(request, len(prefix))
        elif node is not None:
            self._remote.dispatch(request, node, slots)
        return True

    def landed(self, request: Request, cached_tokens: int) -> None:
        """Cache the prompt of a request that has just landed, and exchange what was cached before it landed.

        cached_tokens: tokens that were not computed for that. A node that prefills computes what it lacks of the
        prompt, also what the decode node has.
        """
        if request.cached_tokens is None:
            request.cached_tokens = cached_tokens
        self._cache(request, exchange=True)

    def _hold_prefix(self, request: Request) -> HostSlots:
        """Give a waiting request the slots of its longest cached prefix, until it is released."""
        assert request.host_slots is None
        request.may_be_shared = True
        request.host_slots = NO_SLOTS
        if self._prefixes is not None and not request.lacks_logprobs:
            request.host_slots = self._prefixes.hold(request.kv_token_ids, request.generate.cache_salt)
        return request.host_slots

    def _hold_prompt(self, request: Request, donor: Request) -> HostSlots:
        """Give a waiting request the slots of a prompt that another one has the KV of, but for the prompt's last token.

        Whole blocks are cached; the slots after them are the donor's, too, which writes to none of them any more.
        """
        prefix = self._hold_prefix(request)
        slots = donor.host_slots
        if donor.state is RequestState.RUNNING:
            slots = self._coordinator.host_slots(donor.request_id)
        assert slots is not None
        of_prompt = HostSlots(slots.cut(len(request.generate.prompt_ids) - 1)[0])
        rest = HostSlots(of_prompt.cut(len(prefix))[1])
        self._coordinator.host.retain(rest)
        request.host_slots = prefix.extend(rest.extents)
        request.may_be_shared = donor.may_be_shared
        return request.host_slots

    def _reserve_host(self, request: Request, num_tokens: int) -> HostSlots | None:
        """Host slots for tokens of a request that are not cached, or None.

        Leaves running requests room to grow: for that they would soon drop it.
        """
        if self._has_room(num_tokens):
            return self._coordinator.host.allocate(num_tokens)
        self._shortage = _Shortage(request.request_id, num_tokens, self._insertions)
        return None

    def _must_wait(self, request: Request) -> bool:
        """Whether `_reserve_host` would refuse a request again, as far as that is known without a look at the cache.

        The first request in the queue is asked for in every turn, and a look takes a millisecond for a long prompt.
        """
        short = self._shortage
        is_known = short is not None and (short.request_id, short.insertions) == (request.request_id, self._insertions)
        return short is not None and is_known and not self._has_room(short.num_tokens)

    def _has_room(self, num_tokens: int) -> bool:
        return self._coordinator.host.free - num_tokens >= HOST_GRANULE * self._coordinator.num_running

    @property
    def _insertions(self) -> int:
        return 0 if self._prefixes is None else self._prefixes.blocks.insertions

    def admit(self, request: Request) -> bool:
        """Give device slots to a request whose KV is in host memory. False if there are too few."""
        device, num_tokens = self._coordinator.device, request.kv_tokens
        if not device.has_room_for(num_tokens):
            return False
        assert request.host_slots is not None
        limit = request.most_kv_tokens
        if not self._coordinator.admit_request_direct(request.request_id, request.host_slots, num_tokens, limit):
            return False
        request.host_slots, request.drafts = None, ()
        request.swapped = self._coordinator.counters() if request.span.is_recorded else None
        return True

    def make_room(self) -> list[Request]:
        """The running requests that get another token and have room for it, in order.

        The last give way until the others have room. Requests whose room is about to become free, from quarantine
        or after a step, sit this step out.
        """
        while True:
            wanting = [request for request in self._requests.in_state(RequestState.RUNNING) if request.wants_step]
            short_of = self._coordinator.append_tokens([request.request_id for request in wanting])
            ready = [request for request in wanting if request.request_id not in short_of]
            if Tier.DEVICE in short_of.values():
                self._retract(self._requests.in_state(RequestState.RUNNING)[-1])
            elif not short_of or not self._free_host_slots(len(short_of), can_wait=bool(ready)):
                return ready

    def release(self, request: Request, keep: bool = True) -> None:
        """The one release path: give back whatever the request's state says it holds.

        keep: cache its KV.
        """
        match request.state:
            case RequestState.WAITING:
                self._release_prefix(request)
            case RequestState.PREFILLING:
                self._remote.abandon(request)
                self._release_prefix(request)
            case RequestState.RUNNING | RequestState.LANDED | RequestState.RETRACTED:
                if request.state is RequestState.RUNNING:
                    self._leave_device(request)
                if keep:
                    self._cache(request)
                self._release_host(request)
            case RequestState.LOCAL_PREFILL | RequestState.STAGING:
                assert self._local is not None
                if self._local.cancel(request):
                    self._release_host(request)

    def _cache(self, request: Request, exchange: bool = False) -> None:
        """Cache the KV of all tokens but the newest, which a step in flight may be writing.

        A step writes from its newest token on, and the tokens of a request are taken when their steps are over. So
        whatever is in flight, the KV of the first `kv_tokens` tokens is in host memory and stays as it is.

        exchange: give the request the slots of blocks that were cached before. No step may be reading its own.
        """
        if self._prefixes is not None and request.may_be_shared:
            assert request.host_slots is not None
            cache = self._prefixes.share if exchange else self._prefixes.insert
            request.host_slots = cache(request.shared_token_ids, request.host_slots, request.generate.cache_salt)

    def _release_prefix(self, request: Request) -> None:
        """At once: no process writes to cached slots."""
        if request.host_slots is not None:
            self._coordinator.host.release(request.host_slots)
            request.host_slots = None

    def _release_host(self, request: Request) -> None:
        assert request.host_slots is not None
        self._coordinator.release_host(request.host_slots)
        request.host_slots = None

    def _free_host_slots(self, short: int, can_wait: bool) -> bool:
        """Drop the last request that holds host slots, as `short` requests lack some.

        False if none is dropped: only the first holds any, or as many slots are about to become free. Of slots in
        quarantine nobody knows how long they stay there, so if no request can go on meanwhile (`can_wait` is False),
        only those count that have just come there.
        """
        quarantine = self._remote.quarantine
        coming = self._coordinator.releasing_slots
        coming += quarantine.num_slots + self._remote.lingering_slots if can_wait else quarantine.fresh_slots(_FRESH_S)
        # All but waiting requests hold host slots.
        _, *others = (request for request in self._requests.values() if request.state is not RequestState.WAITING)
        if not others or coming >= short:
            return False
        self._drop(others[-1])
        return True

    def _retract(self, request: Request) -> None:
        """Take its device slots. Its KV stays on the host, and it resumes by another direct admission."""
        self._leave_device(request)
        request.move(RequestState.RETRACTED)
        request.retractions += 1
        self._metrics.retractions.labels("device").inc()
        log.info("retracted", request_id=request.request_id, kv_tokens=request.kv_tokens)

    def _drop(self, request: Request) -> None:
        """Take its host slots. It is prefilled again later, with the tokens that it has emitted."""
        was = request.state.value
        log.info("gives its host slots up", request_id=request.request_id, kv_tokens=request.kv_tokens, was=was)
        self.release(request)
        request.move(RequestState.WAITING)
        request.retractions += 1
        self._metrics.retractions.labels("host").inc()

    def _leave_device(self, request: Request) -> None:
        """Take the device slots of a running request, which gets its host slots."""
        request.host_slots = self._coordinator.retract_request(request.request_id)
        request.stage.note(lambda: spans.decoded(request, self._coordinator.counters()))
