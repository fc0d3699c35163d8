"""Owner of the requests in the KV tiers of a decode node, and of everything that they hold there."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
import structlog
import torch

from hisparse.resident_rows import ResidentRows, RunningRequest
from hisparse.staging import CopyStream, StagingArea
from hisparse.step import DecodeStep, StepError
from hisparse.swap_in import Span, StagedKV, SwapInBackend, SwapInCounters
from kvcache.extents import HostSlots, SlotAccountingError

log = structlog.get_logger(__name__)

HOST_GRANULE = 64
"""Host slots are taken this many at a time as a request grows, so that its slots stay contiguous."""


class LifecycleError(RuntimeError):
    """A request was asked to do what its state does not allow."""


class Tier(Enum):
    """The tier that had no room."""

    HOST = "host"
    DEVICE = "device"


@dataclass(frozen=True)
class StepPlaces:
    """Where the tokens of one step go. number: of the step, from 1. width: tokens of each request that it computes at
    most. longest: tokens that the longest sequence of the step may come to have.

    int64 [batch] on the host: rows, of the device tables; ends, the positions before which each row may compute tokens;
    most, the tokens that the step gives each row at most.
    """

    number: int
    width: int
    longest: int
    rows: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    most: npt.NDArray[np.int64]


class HiSparseCoordinator:
    """Decides, alone, which positions of which request are in the hot buffer.

    The host tier holds every token of every request. The hot buffer is a cache of it, per request and index layer. It
    is never written back, because each new token is copied to the host in the step that computes it.

    While hot slots are free, rows are *resident*: all of their positions have one (`residents`). docs/residency.md has
    states and events.

    The caller owns a request's host slots until it admits the request, directly (it runs) or into staging (its prompt
    is copied to the host first), and after `staging.poll` or `retract_request` has handed them back. In between the
    coordinator owns them.

    Invariants:
    1. A position older than the newest has a complete host copy, so evicting it loses nothing. Only the device knows
       how many drafts of a step were accepted, and so which position is the newest, until the step is read.
    2. After swap-in, the bytes at every returned slot are the host copy's, or the slot is the newest token's.
    3. A hit is not evicted in the step that hit it, and a row's slots are used by no other row.
    4. Host slots, staged pages, rows, hot slots and index pages have one owner and are released once.

    Steps run on the device in the order in which they were begun, while the caller goes on. Rows, hot slots and index
    pages may change owners at once, because the device does the next owner's work later. Host slots may not: remote
    writers do not wait for the device, so host slots are free only when the steps that were begun are over
    (`step_over`).

    One thread uses it. `verify` checks invariant 2 after every swap-in, which is slow.
    """

    def __init__(
        self, backend: SwapInBackend, copy_stream: CopyStream, verify: bool = False, resident_rows: bool = True
    ) -> None:
        """resident_rows: whether rows may be resident beyond their hot buffer."""
        self.host = backend.host
        self.device = backend.device
        self._window = backend.device.window
        self._residency = backend.residency
        self._backend = backend
        self._verify = verify
        self._copy_stream = copy_stream
        self.staging = StagingArea(backend, copy_stream)
        self._running: dict[str, RunningRequest] = {}
        self.residents = ResidentRows(backend, copy_stream, self._running.values(), resident_rows)
        self.counted = SwapInCounters(0, 0, 0, 0)
        """What `counters` returned last: for those that must not wait for the device."""
        self._begun = 0
        self._over = 0
        """Numbers of the last step that was begun, and of the last that is over."""
        self._releasing: deque[tuple[int, HostSlots]] = deque()
        """Host slots that become free when that step is over."""

    # Admission

    def admit_request_direct(
        self, request_id: str, host_slots: HostSlots, num_tokens: int, limit: int | None = None
    ) -> bool:
        """Start to run a request whose first `num_tokens` tokens (0 for a prompt of one token) are on the host.

        limit: tokens whose KV it may come to need; the context by default. Takes over `host_slots`. A short request,
        which fits the hot buffer, is copied into it; a long one starts with an empty hot buffer. False (nothing
        changed) if the device has no room. Raises ValueError if the request does not fit its slots or the context,
        LifecycleError if the id is taken.
        """
        self._check_admission(request_id, host_slots, num_tokens)
        row = self.device.allocate_row(num_tokens)
        while row is None and self.device.has_free_row and self.residents.reclaim(self._begun):
            row = self.device.allocate_row(num_tokens)
        if row is None:
            return False
        self.device.set_host_slots(row, 0, host_slots.slots())
        self._backend.load_index_keys(row, num_tokens)
        if num_tokens <= self.device.device_buffer_size + 1 - self._window:
            self._backend.preload(row, num_tokens)
            self._residency.reset_short(row)
            if self.residents.enabled:
                self.device.make_resident(row)
        else:
            self._residency.reset_empty(row)
        limit = self.device.max_context if limit is None else limit
        self._running[request_id] = RunningRequest(row, host_slots, num_tokens, limit, room=num_tokens)
        return True

    def admit_request_into_staging(
        self, request_id: str, host_slots: HostSlots, staged: StagedKV, num_tokens: int, first: int = 0
    ) -> None:
        """Start to copy a prompt that was computed on this node to the host, in parallel to the step loop.

        first: the position that `staged` begins with; the host has those before it. Takes over `host_slots` and the
        staged pages until `staging.poll` names the request or it is aborted.
        """
        self._check_admission(request_id, host_slots, num_tokens)
        self.staging.start(request_id, host_slots, staged, num_tokens, first)

    # Decoding

    def append_tokens(self, request_ids: Sequence[str]) -> dict[str, Tier]:
        """Give every request room for its next step: host slots, index pages, hot slots.

        A request gets room for all that a step and its drafts may write, or at least for one more token. All or nothing
        per request, in the given order. Returns the requests that got no room, with the tier that was short. Raises
        ValueError for a request at the end of the context.
        """
        tiers = {request_id: self._grow(self._request(request_id)) for request_id in request_ids}
        return {request_id: tier for request_id, tier in tiers.items() if tier is not None}

    def begin_step(self, request_ids: Sequence[str], width: int = 1) -> StepPlaces:
        """Count up to `width` more tokens of each request. Raises StepError for a request that has no room
        (`append_tokens`).

        The caller queues the step (`cache`) before it calls anything else here, and calls `step_over` when the device
        has finished it.
        """
        if not request_ids or len(set(request_ids)) != len(request_ids):
            raise ValueError(f"a step needs distinct requests, found {list(request_ids)}")
        requests = [self._request(request_id) for request_id in request_ids]
        for request_id, request in zip(request_ids, requests, strict=True):
            if request.room <= request.reached < request.limit:
                raise StepError(f"request {request_id} has no room for token {request.reached}: append_tokens first")
        self._begun += 1
        ends = np.array([request.end for request in requests])
        reached = np.array([request.reached for request in requests])
        most = np.minimum(width, ends - reached)
        for request, tokens in zip(requests, most.tolist(), strict=True):
            request.unread += tokens
        return StepPlaces(
            number=self._begun,
            width=width,
            longest=min(int(reached.max()) + self._window, self.device.max_context),
            rows=np.array([request.row for request in requests]),
            ends=ends,
            most=most,
        )

    def cache(
        self,
        rows: torch.Tensor,
        newest: torch.Tensor,
        queries: Span,
        stored: Span,
        max_tokens: int,
        layers: range | None = None,
        backs_up: bool = True,
    ) -> DecodeStep:
        """What the model runs against in one pass of a step, or in all replays of a recorded one: see DecodeStep.

        layers: all by default.
        """
        layers = range(self.host.layout.num_layers) if layers is None else layers
        # A device that computes in the order of the calls need not be waited for.
        known = rows.device.type == "cpu"
        lengths = tuple((queries.positions() + 1).tolist()) if known else None
        return DecodeStep(
            self._backend, self._verify, rows, newest, queries, stored, layers, max_tokens, lengths, backs_up
        )

    def step_over(self, places: StepPlaces, counts: Mapping[str, int] | None = None) -> None:
        """Note that the device writes nothing more for the steps up to this one, computed or given up.

        counts: how many tokens the step gave each request; None if it was given up, and its requests end.
        """
        if counts is not None:
            for (request_id, count), most in zip(counts.items(), places.most.tolist(), strict=True):
                if (request := self._running.get(request_id)) is not None:
                    request.unread -= most
                    request.num_tokens += count
        self._over = max(self._over, places.number)
        while self._releasing and self._releasing[0][0] <= places.number:
            self.host.release(self._releasing.popleft()[1])

    def fill_rows(self) -> None:
        """Go on making rows resident while hot slots are free. Call it once in every turn of the loop, after the step
        was queued."""
        self.residents.fill(self._begun)

    # Leaving

    def retract_request(self, request_id: str) -> HostSlots:
        """Free what a running request has on the device. Returns its host slots, which the caller owns.

        The caller resumes the request by `admit_request_direct` with the same `num_tokens`, or calls `release_host`.
        """
        request = self._request(request_id)
        self.residents.leave(request.row)
        del self._running[request_id]
        self.device.free_row(request.row)
        return request.host_slots

    def release_host(self, slots: HostSlots) -> None:
        """Free host slots as soon as the steps that were begun, which may still write to them, are over."""
        if self._begun == self._over:
            self.host.release(slots)
        else:
            self._releasing.append((self._begun, slots))

    def host_slots(self, request_id: str) -> HostSlots:
        """The host slots of a running request. The coordinator owns them."""
        return self._request(request_id).host_slots

    def row(self, request_id: str) -> int:
        """The row of a running request in the device tables."""
        return self._request(request_id).row

    def num_tokens(self, request_id: str) -> int:
        """How many tokens of a running request have KV on the host, by the steps that were read."""
        return self._request(request_id).num_tokens

    # Watching

    @property
    def releasing_slots(self) -> int:
        """Host slots that become free when a step or a copy that may still touch them is over."""
        return sum(len(slots) for _, slots in self._releasing) + self.staging.aborted_slots

    @property
    def num_running(self) -> int:
        return len(self._running)

    def counters(self) -> SwapInCounters:
        """What was swapped in since the start, and what could not be. Any thread may ask; the device answers."""
        self.counted = self._backend.counters()
        return self.counted

    def is_idle(self) -> bool:
        """Whether no request is here and every pool, apart from the prefix cache, is as full as at start.

        False while the caller holds host slots. Raises SlotAccountingError if something leaked on the device.
        """
        self.residents.filler.poll()
        if self._running or len(self.staging) or self._releasing or not self.residents.filler.is_idle:
            return False
        self.check_integrity()
        return self.host.used == 0

    def check_integrity(self) -> None:
        """Raise SlotAccountingError unless rows, slots and pages in use are exactly those of running requests.

        Waits for the device, and raises its errors.
        """
        self._backend.drain()
        self.host.check_integrity()
        self.device.check_integrity()
        if self.device.used_rows != len(self._running):
            raise SlotAccountingError(f"{self.device.used_rows} rows used by {len(self._running)} running requests")
        for request in self._running.values():
            self._residency.check_integrity(request.row)

    def close(self) -> None:
        """Stop the copy stream and unpin the host pool. Errors of a device that has failed are logged."""
        for end in (self._copy_stream.shutdown, self._backend.drain, self.host.close):
            try:
                end()
            except Exception as error:
                log.error("the KV tiers cannot be closed", error=str(error))

    # Inside

    def _request(self, request_id: str) -> RunningRequest:
        request = self._running.get(request_id)
        if request is None:
            where = "in staging" if request_id in self.staging else "unknown"
            raise LifecycleError(f"request {request_id} is {where}, not running")
        return request

    def _check_admission(self, request_id: str, host_slots: HostSlots, num_tokens: int) -> None:
        if request_id in self._running or request_id in self.staging:
            raise LifecycleError(f"request {request_id} is here already")
        if not 0 <= num_tokens <= min(len(host_slots), self.device.max_context):
            raise ValueError(
                f"request {request_id} has {num_tokens} tokens, {len(host_slots)} host slots, "
                f"and a context of {self.device.max_context}"
            )

    def _grow(self, request: RunningRequest) -> Tier | None:
        """Make room for its next step. Returns the tier that is short (nothing taken), None if there is room."""
        if request.num_tokens >= request.limit:
            raise ValueError(f"the request in row {request.row} has all of the {request.limit} tokens that it may have")
        least = min(request.reached + 1, request.limit)
        wanted = min(request.reached + self._window, request.limit)
        if request.room >= wanted:
            return None
        tier = self._give_room(request, wanted)
        if tier is not None and wanted > least > request.room:
            tier = self._give_room(request, least)
        return None if request.room >= least else tier

    def _give_room(self, request: RunningRequest, num_tokens: int) -> Tier | None:
        """Make room for that many tokens in all, or return the tier that is short (nothing taken)."""
        held = len(request.host_slots)
        if num_tokens - held > self.host.free:
            return Tier.HOST
        if not self._grow_row(request, num_tokens):
            return Tier.DEVICE
        if held < num_tokens:
            granule = min(max(HOST_GRANULE, num_tokens - held), self.host.free, self.device.max_context - held)
            grown = self.host.extend(request.host_slots, granule)
            assert grown is not None, "as many are free"
            self.device.set_host_slots(request.row, held, grown.slots()[held:])
            request.host_slots = grown
        request.room = min(len(request.host_slots), self.device.room(request.row))
        return None

    def _grow_row(self, request: RunningRequest, num_tokens: int) -> bool:
        """Give a row index pages and hot slots for that many tokens. False if slabs are short.

        A resident row that finds none becomes a long one if it has as many tokens as that.
        """
        device, row = self.device, request.row
        while not device.grow(row, num_tokens):
            if not self.residents.reclaim(self._begun):
                break
        else:
            return True
        is_long = num_tokens - 1 + self._window > device.device_buffer_size
        if device.is_resident(row) and is_long and device.can_make_long(row):
            self.residents.make_long(request)
        return device.grow(row, num_tokens)
