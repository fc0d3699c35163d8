"""The prefill node's loop: receive, compute a chunk, send it while the next one computes."""

import time

import structlog
import torch

from prefill_node.chunked import ChunkedPrefill, ComputedChunk, PrefillJob
from prefill_node.convert import prompt_tensor, sampling_params, token_message
from prefill_node.entry import Entry, Key, Offer, State
from prefill_node.sender import Chunk, Sender, Sent
from service.shell import NodeShell
from transfer.messages import (
    Abort,
    Admitted,
    HeartbeatAck,
    Holding,
    Message,
    NotHeld,
    Peer,
    Pong,
    PrefillAccepted,
    PrefillFailed,
    PrefillRequest,
    Quiesced,
    Refused,
    Registered,
)
from transfer.planner import expand_extents
from transfer.tombstones import Tombstones

log = structlog.get_logger(__name__)

_ORPHAN_AFTER_S = 10.0
_IDLE_WAIT_S = 0.2
_DRAIN_S = 10.0


class PrefillNode:
    """Owns every entry; the sender's threads only report back through the inbox."""

    def __init__(
        self,
        shell: NodeShell[Sent],
        prefill: ChunkedPrefill[Key],
        sender: Sender,
        offer: Offer,
        device: torch.device,
    ) -> None:
        self._shell = shell
        self._control = shell.control
        self._metrics = shell.metrics
        self._prefill = prefill
        self._sender = sender
        self._offer = offer
        self._device = device
        self._entries: dict[Key, Entry] = {}
        self._ended: Tombstones[Key] = Tombstones()
        self._housekeeping_at = 0.0

    @property
    def queued_tokens(self) -> int:
        return self._prefill.queued_tokens

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def run(self) -> None:
        """Serve until told to stop; then tell whom it concerns, when nothing of it is in flight any more."""
        while not self._shell.stopping.is_set():
            for item in self._shell.receive(0 if self._prefill.has_work else _IDLE_WAIT_S):
                self._take(item)
            self._housekeep(time.monotonic())
            for computed in self._compute():
                self._send(computed)
        self._shell.leave()
        self._hand_back()

    def refresh_metrics(self) -> None:
        pool = self._prefill.pool
        self._metrics.prefill_pages.labels("free").set(pool.free_pages)
        self._metrics.prefill_pages.labels("used").set(pool.num_pages - pool.free_pages)
        states = [entry.state for entry in list(self._entries.values())]
        for state in State:
            self._metrics.requests.labels(state.value).set(states.count(state))

    # --- messages ---

    def _take(self, item: tuple[Peer, Message] | Sent) -> None:
        match item:
            case Sent():
                self._on_sent(item)
            case (sender, PrefillRequest() as message):
                self._on_request(sender, message)
            case (_, Admitted() as message):
                self._on_admitted((message.request_id, message.epoch))
            case (sender, Abort() as message):
                self._on_abort(sender, (message.request_id, message.epoch))
            case (sender, Holding() as message):
                self._control.send(sender, NotHeld(keys=tuple(key for key in message.keys if key not in self._entries)))
            case (_, Registered() | Refused() | HeartbeatAck() | Pong()):
                pass
            case (sender, message):
                log.warning("not for a prefill node", kind=type(message).__name__, sender=sender.address)

    def _on_request(self, decode: Peer, request: PrefillRequest) -> None:
        key = request.request_id, request.epoch
        if key in self._ended:
            # Said to be over before: a repeat that was under way must not start it again.
            self._control.send(decode, Quiesced(request_id=request.request_id, epoch=request.epoch))
            return
        self._control.send(decode, PrefillAccepted(request_id=request.request_id, epoch=request.epoch))
        if key in self._entries:
            return
        if refusal := self._offer.refusal(request):
            log.warning("refused", request_id=request.request_id, epoch=request.epoch, reason=refusal)
            self._control.send(
                decode, PrefillFailed(request_id=request.request_id, epoch=request.epoch, reason=refusal)
            )
            self._ended.add(key)
            return
        entry = Entry(
            request,
            decode,
            PrefillJob(
                key,
                prompt_tensor(request.prompt_ids, self._device),
                sampling_params(request.sampling),
                request.step,
            ),
            expand_extents(request.extents),
        )
        self._entries[key] = entry
        self._prefill.add(entry.job)
        log.info("queued", request_id=request.request_id, epoch=request.epoch, tokens=len(request.prompt_ids))

    def _on_admitted(self, key: Key) -> None:
        self._control.answered(("done", key))
        entry = self._entries.get(key)
        if entry is not None and entry.state is State.DONE:
            self._end(entry)

    def _on_abort(self, sender: Peer, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is None:
            self._ended.add(key)
            self._control.send(sender, Quiesced(request_id=key[0], epoch=key[1]))
        else:
            self._stop_entry(entry, failure=None)

    # --- work ---

    def _compute(self) -> list[ComputedChunk[Key]]:
        try:
            return self._prefill.step()
        except Exception as error:
            # A batch that cannot be computed (out of memory, say) costs its requests; others go on.
            log.exception("prefill step failed")
            for entry in list(self._entries.values()):
                if entry.job.computed or entry.job.pages is not None:
                    self._stop_entry(entry, failure=f"prefill failed: {error}")
            return []

    def _send(self, computed: ComputedChunk[Key]) -> None:
        self._metrics.prompt_tokens.inc(computed.stop - computed.start)
        entry = self._entries[computed.job.key]
        if computed.token is not None:
            entry.token = token_message(computed.token)
            entry.state = State.SENDING
        assert entry.job.pages is not None
        entry.in_flight += 1
        self._sender.submit(
            Chunk(
                request_id=entry.request.request_id,
                epoch=entry.request.epoch,
                start=computed.start,
                stop=computed.stop,
                pages=entry.job.pages,
                slots=entry.slots,
                destination=entry.request.destination,
                ready=_record_event(self._device),
                cancelled=lambda: entry.state is State.STOPPING,
            )
        )

    def _on_sent(self, sent: Sent) -> None:
        entry = self._entries[sent.chunk.request_id, sent.chunk.epoch]
        entry.in_flight -= 1
        if sent.error is None:
            entry.num_bytes += sent.num_bytes
            entry.num_descriptors += sent.num_descriptors
            entry.seconds += sent.seconds
            self._metrics.transfer_bytes.inc(sent.num_bytes)
            self._metrics.transfer_descriptors.inc(sent.num_descriptors)
            self._metrics.transfer_seconds.observe(sent.seconds)
        elif entry.state is not State.STOPPING:
            self._metrics.transfer_failures.labels("write").inc()
            self._stop_entry(entry, failure=f"transfer failed: {sent.error}")
            return
        if entry.state is State.STOPPING:
            self._end_if_drained(entry)
        elif entry.state is State.SENDING and entry.in_flight == 0:
            self._announce(entry)

    def _announce(self, entry: Entry) -> None:
        """Every write landed: say so until the decode node answers."""
        entry.state = State.DONE
        self._control.repeat(("done", entry.key), entry.decode, entry.done())
        log.info(
            "sent",
            request_id=entry.request.request_id,
            epoch=entry.request.epoch,
            bytes=entry.num_bytes,
            descriptors=entry.num_descriptors,
            seconds=round(entry.seconds, 4),
        )

    # --- endings ---

    def _stop_entry(self, entry: Entry, failure: str | None) -> None:
        """Post nothing more of it; it ends when what is posted has drained."""
        if entry.state is not State.STOPPING:
            entry.state = State.STOPPING
            entry.failure = failure
            self._prefill.forget(entry.job)
        self._end_if_drained(entry)

    def _end_if_drained(self, entry: Entry) -> None:
        if entry.in_flight:
            return
        request_id, epoch = entry.key
        if entry.failure is None:
            self._control.send(entry.decode, Quiesced(request_id=request_id, epoch=epoch))
        else:
            self._control.send(entry.decode, PrefillFailed(request_id=request_id, epoch=epoch, reason=entry.failure))
        self._end(entry)
        log.info("stopped", request_id=request_id, epoch=epoch, reason=entry.failure or "aborted")

    def _end(self, entry: Entry) -> None:
        """The one place where an entry's pages go back."""
        self._control.answered(("done", entry.key))
        self._prefill.release(entry.job)
        del self._entries[entry.key]
        self._ended.add(entry.key)

    def _hand_back(self) -> None:
        """End every entry, so that decode nodes go elsewhere at once; bounded, as a receiver may have stopped."""
        for entry in list(self._entries.values()):
            self._stop_entry(entry, failure="the prefill node is stopping")
        deadline = time.monotonic() + _DRAIN_S
        while self._entries and time.monotonic() < deadline:
            for item in self._shell.receive(_IDLE_WAIT_S):
                self._take(item)

    def _housekeep(self, now: float) -> None:
        """Give up what no decode node asks for any more, and the threads that no request needs."""
        if now < self._housekeeping_at:
            return
        self._housekeeping_at = now + 1.0
        for entry in list(self._entries.values()):
            heard = self._control.last_heard(entry.decode.boot_id)
            if heard is not None and now - heard > _ORPHAN_AFTER_S:
                log.warning("decode node is silent", request_id=entry.request.request_id, decode=entry.decode.address)
                self._stop_entry(entry, failure="the decode node is silent")
        self._sender.keep_only({entry.request.destination.session for entry in self._entries.values()})


def _record_event(device: torch.device) -> torch.cuda.Event | None:
    """An event after the work queued so far; None where the device works synchronously."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
