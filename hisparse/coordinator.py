"""The one owner of what is where: requests in the KV tiers of a decode node."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from hisparse.copy_stream import CopyStream
from hisparse.device_pool import DeviceKVPool
from hisparse.extents import HostSlots, SlotAccountingError
from hisparse.host_pool import HostKVPool
from hisparse.lifecycle import LifecycleError, RequestState, move
from hisparse.residency import Residency
from hisparse.staging import Staged, StagingArea
from hisparse.step import DecodeStep, StepError, Tiers
from hisparse.swap_in import StagedKV, SwapInBackend, SwapInCounters

HOST_GRANULE = 64
"""Host slots are taken this many at a time as a request grows, so that its slots stay contiguous."""


class Tier(Enum):
    """Where there was no room."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True)
class AppendResult:
    """Which requests have room for their next token, and what the others lack."""

    ready: tuple[str, ...]
    short_of: dict[str, Tier]


@dataclass(frozen=True)
class Place:
    """The row of a running request and the position of the token that it computes next."""

    row: int
    newest: int


@dataclass(eq=False)
class _Request:
    """A running request. num_tokens: tokens whose KV is complete on the host, in all layers."""

    state: RequestState
    row: int
    host_slots: HostSlots
    num_tokens: int


class HiSparseCoordinator:
    """Decides which positions of which request are in the hot buffer, and is the only one who does.

    The host tier holds every token of every request; the hot buffer is a cache of it, per request and index layer,
    that is never written back, because each new token is copied to the host in the step that computes it. A request
    enters when its prompt is on the host (`admit_request_direct`) and leaves by handing its host slots back
    (`retract_request`) or by freeing them (`request_finished`).

    It holds that
    1. a position older than the newest has a complete host copy, so that evicting it loses nothing;
    2. after swap-in, the bytes at every returned slot are the host copy's, or the slot is the newest one's;
    3. a hit is not evicted in the step that hit it, and a row's slots are used by no other row;
    4. host slots, staged pages, rows, hot slots and index pages have one owner and are released once.

    One thread uses it. `verify` checks 2 after every swap-in, which is slow.
    """

    def __init__(
        self,
        host: HostKVPool,
        device: DeviceKVPool,
        residency: Residency,
        backend: SwapInBackend,
        copy_stream: CopyStream,
        verify: bool = False,
    ) -> None:
        self.host = host
        self.device = device
        self._residency = residency
        self._backend = backend
        self._tiers = Tiers(host, device, backend, verify)
        self._copy_stream = copy_stream
        self._staging = StagingArea(host, backend, copy_stream)
        self._running: dict[str, _Request] = {}
        self._step: DecodeStep | None = None

    # Admission

    def admit_request_direct(self, request_id: str, host_slots: HostSlots, num_tokens: int) -> bool:
        """Start to run a request whose first `num_tokens` tokens are on the host.

        Takes over `host_slots`. No KV is copied to the device except a short request's, which fits the hot buffer; a
        long request starts with an empty one. False (nothing held, nothing changed) if the device has no room.
        Raises ValueError if the request does not fit its slots or the context, LifecycleError if the id is taken.
        """
        self._check_admission(request_id, host_slots, num_tokens)
        row = self.device.alloc_logical_only(num_tokens)
        if row is None:
            return False
        if not self.device.grow(row, num_tokens):
            self.device.free_row(row)
            return False
        self.device.set_host_slots(row, 0, host_slots.slots())
        self._backend.load_index_keys(row, num_tokens)
        if num_tokens <= self.device.device_buffer_size:
            self._backend.preload(row, num_tokens)
            self._residency.reset_short(row)
        else:
            self._residency.reset_empty(row)
        state = move(request_id, RequestState.NEW, RequestState.RUNNING)
        self._running[request_id] = _Request(state, row, host_slots, num_tokens)
        return True

    def admit_request_into_staging(
        self, request_id: str, host_slots: HostSlots, staged: StagedKV, num_tokens: int
    ) -> None:
        """Start to copy a prompt that was computed on this node to the host, beside the step loop.

        Takes over `host_slots` and the staged pages until `poll_staging` names the request or it is aborted.
        """
        self._check_admission(request_id, host_slots, num_tokens)
        self._staging.start(request_id, host_slots, staged, num_tokens)

    def poll_staging(self) -> Staged:
        """Requests whose prompt is on the host now, and those whose copy failed.

        The pages of the former were released and their host slots are the caller's again, for `admit_request_direct`;
        the latter hold nothing any more. To be called in every turn of the loop: it also frees what aborted requests
        held.
        """
        return self._staging.poll()

    def abort_staging_request(self, request_id: str) -> bool:
        """Give up a request in staging: its pages and host slots are released, once, when its copy is over.

        False if it is not in staging (any more); then the coordinator holds nothing for the caller to worry about.
        """
        return self._staging.abort(request_id)

    # Decoding

    def append_tokens(self, request_ids: Sequence[str]) -> AppendResult:
        """Give every request room for its next token: a host slot, an index page, a hot slot.

        All or nothing per request, in the given order. A request that has the room already is ready at once.
        Raises ValueError for a request that is at the context's end.
        """
        short_of: dict[str, Tier] = {}
        for request_id in request_ids:
            tier = self._grow(self._request(request_id))
            if tier is not None:
                short_of[request_id] = tier
        return AppendResult(tuple(r for r in request_ids if r not in short_of), short_of)

    def begin_step(self, request_ids: Sequence[str]) -> DecodeStep:
        """Begin to compute one token for each request, all of which must be ready (`append_tokens`).

        A step that was begun before and not finished is abandoned: its tokens do not count and may be computed again.
        """
        places = self.place(request_ids)
        lengths = tuple(place.newest + 1 for place in places)
        self._step = DecodeStep(
            self._tiers,
            self.device.upload([place.row for place in places]),
            self.device.upload([place.newest for place in places]),
            max(lengths),
            tuple(request_ids),
            lengths,
        )
        return self._step

    def place(self, request_ids: Sequence[str]) -> list[Place]:
        """Where the requests of a step are, all of which must be ready. A step in progress is abandoned."""
        if not request_ids or len(set(request_ids)) != len(request_ids):
            raise ValueError(f"a step needs distinct requests, found {list(request_ids)}")
        self._abandon_step()
        requests = [self._request(request_id) for request_id in request_ids]
        for request_id, request in zip(request_ids, requests, strict=True):
            if not self._has_room(request):
                raise StepError(f"request {request_id} has no room for token {request.num_tokens}: append_tokens first")
        return [Place(request.row, request.num_tokens) for request in requests]

    def begin_recorded_step(self, rows: torch.Tensor, newest: torch.Tensor, max_tokens: int) -> DecodeStep:
        """Begin a step that is recorded, to be carried out again and again, and not computed for any request now.

        rows, newest: int64 [batch] on the device, below 0 for padding; the requests are those that they name whenever
        the record is replayed, between `place` and `finish_replay`. max_tokens: of the longest of them, the newest
        included.
        """
        self._abandon_step()
        self._step = DecodeStep(self._tiers, rows, newest, max_tokens)
        return self._step

    def finish_step(self, step: DecodeStep) -> None:
        """Copy the step's new tokens to the host and count them: from here on they are evictable.

        Raises StepError if the step was finished or abandoned before.
        """
        step.finish()
        self._step = None
        self._count(step.request_ids)

    def finish_replay(self, step: DecodeStep, request_ids: Sequence[str]) -> None:
        """Count the tokens of a recorded step that was finished when it was recorded, and now replayed for requests."""
        step.verify()
        self._count(request_ids)

    # Leaving

    def retract_request(self, request_id: str) -> HostSlots:
        """Free all that a running request has on the device. Its tokens are all on the host: returns their slots.

        The caller owns them (there may be more of them than tokens) and resumes the request with
        `admit_request_direct`, `num_tokens` being what it was. A step in progress that has the request is abandoned.
        """
        return self._leave(request_id).host_slots

    def request_finished(self, request_id: str) -> None:
        """Free all that a running request has, on the device and on the host."""
        self.host.release(self._leave(request_id).host_slots)

    # Watching

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_staging(self) -> int:
        """Requests in staging, aborted ones whose copy is not over included."""
        return len(self._staging)

    def counters(self) -> SwapInCounters:
        """What was swapped in since the start, and what could not be. Any thread may ask."""
        return self._backend.counters()

    def is_idle(self) -> bool:
        """No request is here, and every pool is exactly as full as at start.

        Host slots that the caller holds make it False. Raises SlotAccountingError if something leaked on the device.
        """
        if self._running or len(self._staging):
            return False
        self.check_integrity()
        return self.host.used == 0

    def check_integrity(self) -> None:
        """Raise SlotAccountingError unless rows, slots and pages in use are exactly those of running requests.

        What the device failed at and nobody has waited for is raised here, too. Swap-in violations are not: they stay
        counted for ever, and say nothing about the pools.
        """
        self._backend.drain()
        self.host.check_integrity()
        self.device.check_integrity()
        if self.device.used_rows != len(self._running):
            raise SlotAccountingError(f"{self.device.used_rows} rows used by {len(self._running)} running requests")
        for request in self._running.values():
            self._residency.check_integrity(request.row)

    def close(self) -> None:
        """Stop the copy stream and unpin the host pool, which nobody else may read or write any more."""
        self._copy_stream.close()
        self._backend.drain()
        self.host.close()

    # Inside

    def _count(self, request_ids: Sequence[str]) -> None:
        """One more token of each request is computed and backed up."""
        for request_id in request_ids:
            self._request(request_id).num_tokens += 1

    def _request(self, request_id: str) -> _Request:
        request = self._running.get(request_id)
        if request is None:
            where = "in staging" if request_id in self._staging else "unknown"
            raise LifecycleError(f"request {request_id} is {where}, not running")
        return request

    def _check_admission(self, request_id: str, host_slots: HostSlots, num_tokens: int) -> None:
        if request_id in self._running or request_id in self._staging:
            raise LifecycleError(f"request {request_id} is here already")
        if not 0 < num_tokens <= min(len(host_slots), self.device.max_context):
            raise ValueError(
                f"request {request_id} has {num_tokens} tokens, {len(host_slots)} host slots, "
                f"and a context of {self.device.max_context}"
            )

    def _has_room(self, request: _Request) -> bool:
        needed = request.num_tokens + 1
        return len(request.host_slots) >= needed and self.device.has_room(request.row, needed)

    def _grow(self, request: _Request) -> Tier | None:
        """Room for one more token, or the tier that lacks it (and nothing taken)."""
        held = len(request.host_slots)
        host_is_short = held < request.num_tokens + 1
        if host_is_short and not self.host.free:
            return Tier.HOST
        if not self.device.grow(request.row, request.num_tokens + 1):
            return Tier.DEVICE
        if host_is_short:
            granule = min(HOST_GRANULE, self.host.free, self.device.max_context - held)
            grown = self.host.extend(request.host_slots, granule)
            if grown is None:
                raise SlotAccountingError(f"{granule} host slots wanted, {self.host.free} free")
            self.device.set_host_slots(request.row, held, grown.slots()[held:])
            request.host_slots = grown
        return None

    def _abandon_step(self) -> None:
        """Leave an unfinished step, if there is one."""
        if self._step is not None:
            self._step.abandon()
            self._step = None

    def _leave(self, request_id: str) -> _Request:
        """The one release path of a row. A step in progress that has the request is abandoned."""
        request = self._request(request_id)
        if self._step is not None and request_id in self._step.request_ids:
            self._abandon_step()
        # Its host slots change hands: what is backed up to them must not land on a remote write of their next owner.
        self._backend.drain()
        request.state = move(request_id, request.state, RequestState.GONE)
        del self._running[request_id]
        self.device.free_row(request.row)
        return request
