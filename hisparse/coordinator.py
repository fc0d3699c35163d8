"""The one owner of what is where: requests in the KV tiers of a decode node."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import structlog
import torch

from hisparse.copy_stream import CopyStream
from hisparse.device_pool import DeviceKVPool
from hisparse.extents import HostSlots, SlotAccountingError
from hisparse.host_pool import HostKVPool
from hisparse.lifecycle import LifecycleError, TierState, move
from hisparse.residency import Residency
from hisparse.staging import Staged, StagingArea
from hisparse.step import DecodeStep, StepError, Tiers
from hisparse.swap_in import StagedKV, SwapInBackend, SwapInCounters

log = structlog.get_logger(__name__)

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
class StepPlaces:
    """Where the tokens of one step go: int64 [batch] each, on the host.

    number: of the step, from 1. rows: of the device tables. newest: the position of the token that each computes.
    """

    number: int
    rows: npt.NDArray[np.int64]
    newest: npt.NDArray[np.int64]


@dataclass(eq=False)
class _RunningRequest:
    """A running request. num_tokens: tokens whose KV is on the host when the steps that were begun are over."""

    state: TierState
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

    Steps run on the device behind the caller, in the order in which they were begun, while the caller goes on. What
    lies on the device changes hands at once, since later work comes later there too. Host slots do not: remote writers
    know nothing of that order, so they are free only when the steps that were begun are over (`step_over`).

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
        self._running: dict[str, _RunningRequest] = {}
        self._begun = 0
        self._over = 0
        """Numbers of the last step that was begun, and of the last that is over."""
        self._releasing: deque[tuple[int, HostSlots]] = deque()
        """Host slots that become free when that step is over."""

    # Admission

    def admit_request_direct(self, request_id: str, host_slots: HostSlots, num_tokens: int) -> bool:
        """Start to run a request whose first `num_tokens` tokens (0 for a prompt of one token) are on the host.

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
        if num_tokens:
            self._backend.load_index_keys(row, num_tokens)
        if num_tokens <= self.device.device_buffer_size:
            if num_tokens:
                self._backend.preload(row, num_tokens)
            self._residency.reset_short(row)
        else:
            self._residency.reset_empty(row)
        state = move(request_id, TierState.NEW, TierState.RUNNING)
        self._running[request_id] = _RunningRequest(state, row, host_slots, num_tokens)
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

    def begin_step(self, request_ids: Sequence[str]) -> StepPlaces:
        """Count one more token of each request, all of which must be ready (`append_tokens`).

        The caller has the device compute these tokens, by `cache`, before it asks the coordinator for anything else,
        and says `step_over` when the device has. Raises StepError for a request that has no room.
        """
        if not request_ids or len(set(request_ids)) != len(request_ids):
            raise ValueError(f"a step needs distinct requests, found {list(request_ids)}")
        requests = [self._request(request_id) for request_id in request_ids]
        for request_id, request in zip(request_ids, requests, strict=True):
            if not self._has_room(request):
                raise StepError(f"request {request_id} has no room for token {request.num_tokens}: append_tokens first")
        self._begun += 1
        places = StepPlaces(
            self._begun,
            np.array([request.row for request in requests]),
            np.array([request.num_tokens for request in requests]),
        )
        for request in requests:
            request.num_tokens += 1
        return places

    def cache(
        self, rows: torch.Tensor, newest: torch.Tensor, max_tokens: int, lengths: tuple[int, ...] | None = None
    ) -> DecodeStep:
        """What the model runs against in one step, or in all replays of a recorded one: see DecodeStep."""
        return DecodeStep(self._tiers, rows, newest, max_tokens, lengths)

    def step_over(self, number: int) -> None:
        """The device has carried out the steps up to this one, or given them up: it writes nothing more for them."""
        self._over = max(self._over, number)
        while self._releasing and self._releasing[0][0] <= number:
            self.host.release(self._releasing.popleft()[1])

    # Leaving

    def retract_request(self, request_id: str) -> HostSlots:
        """Free all that a running request has on the device. Its tokens are all on the host: returns their slots.

        The caller owns them (there may be more of them than tokens), resumes the request with `admit_request_direct`,
        `num_tokens` being what it was, or gives them to `release_host`.
        """
        return self._leave(request_id).host_slots

    def request_finished(self, request_id: str) -> None:
        """Free all that a running request has, on the device and on the host."""
        self.release_host(self._leave(request_id).host_slots)

    def release_host(self, slots: HostSlots) -> None:
        """Take host slots back: free when the steps that were begun are over, which may still write to them."""
        if self._begun == self._over:
            self.host.release(slots)
        else:
            self._releasing.append((self._begun, slots))

    def row(self, request_id: str) -> int:
        """The row of a running request in the device tables."""
        return self._request(request_id).row

    # Watching

    @property
    def releasing_slots(self) -> int:
        """Host slots that become free when a step or a copy that may still touch them is over."""
        return sum(len(slots) for _, slots in self._releasing) + self._staging.aborting_slots

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
        if self._running or len(self._staging) or self._releasing:
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
        """Stop the copy stream and unpin the host pool, which nobody else may read or write any more.

        What a device that failed does not do any more is logged: this is the end of it.
        """
        for end in (self._copy_stream.close, self._backend.drain, self.host.close):
            try:
                end()
            except Exception as error:
                log.error("the KV tiers cannot be closed", error=str(error))

    # Inside

    def _request(self, request_id: str) -> _RunningRequest:
        request = self._running.get(request_id)
        if request is None:
            where = "in staging" if request_id in self._staging else "unknown"
            raise LifecycleError(f"request {request_id} is {where}, not running")
        return request

    def _check_admission(self, request_id: str, host_slots: HostSlots, num_tokens: int) -> None:
        if request_id in self._running or request_id in self._staging:
            raise LifecycleError(f"request {request_id} is here already")
        if not 0 <= num_tokens <= min(len(host_slots), self.device.max_context):
            raise ValueError(
                f"request {request_id} has {num_tokens} tokens, {len(host_slots)} host slots, "
                f"and a context of {self.device.max_context}"
            )

    def _has_room(self, request: _RunningRequest) -> bool:
        needed = request.num_tokens + 1
        return len(request.host_slots) >= needed and self.device.has_room(request.row, needed)

    def _grow(self, request: _RunningRequest) -> Tier | None:
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

    def _leave(self, request_id: str) -> _RunningRequest:
        """The one release path of a row."""
        request = self._request(request_id)
        request.state = move(request_id, request.state, TierState.GONE)
        del self._running[request_id]
        self.device.free_row(request.row)
        return request
