"""The prefill node's loop: receive, start what computes next, note what was computed and what was sent.

The loop never computes and never sends: a thread computes, others send, and both report back through the inbox. So it
hears an abort at once, and says that a transfer ended at once, whatever computes meanwhile.
"""

import time

import structlog

from control.messages import (
    Abort,
    Admitted,
    ChunkTaken,
    HeartbeatAck,
    Holding,
    Message,
    Peer,
    PrefillAccepted,
    PrefillFailed,
    PrefillRequest,
    Progress,
    Refused,
    Registered,
)
from engine.chunked import ChunkedPrefill, ComputedChunk
from engine.convert import token_message
from prefill_node.compute import Computed, ComputeThread
from prefill_node.decode_nodes import DecodeNodes
from prefill_node.destinations import Destinations
from prefill_node.entry import Entry, Key, Offer, State
from prefill_node.outgoing import Chunk, Sent
from prefill_node.over import Over
from prefill_node.progress import ForwardProgress
from prefill_node.sender import Sender
from service.lifecycle import Phase
from service.shell import NodeShell

log = structlog.get_logger(__name__)

_IDLE_WAIT_S = 0.2
_FAREWELL_S = 2.5
"""How long a node that has nothing left still refuses requests: decode nodes hear with their next heartbeat that it
leaves. One that asked a process which is gone could not know that nothing writes to the slots that it named."""
_END_S = 10.0
"""How long a node that gives everything up waits for its writes: a receiver may have stopped."""


class PrefillNode:
    """Owns every entry. `transfer_timeout`: seconds that a request's transfer may go on after its computation."""

    def __init__(
        self,
        shell: NodeShell[Computed | Sent],
        prefill: ChunkedPrefill[Key],
        compute: ComputeThread,
        sender: Sender,
        offer: Offer,
        transfer_timeout: float,
    ) -> None:
        self._shell = shell
        self._control = shell.control
        self._metrics = shell.metrics
        self._prefill = prefill
        self._compute = compute
        self._computing = False
        self._passes = 0
        """Forward passes that were started."""
        self._sender = sender
        self._offer = offer
        self._transfer_timeout = transfer_timeout
        self._entries: dict[Key, Entry] = {}
        self._destinations = Destinations()
        self._over = Over()
        self._decode_nodes = DecodeNodes(shell.control)
        self._housekeeping_at = 0.0

    @property
    def queued_tokens(self) -> int:
        return self._prefill.queued_tokens

    @property
    def num_entries(self) -> int:
        return len(self._entries)

    def run(self) -> None:
        """Serve until told to stop; finish what has begun and hand back the rest; give up what is left."""
        lifecycle = self._shell.lifecycle
        while lifecycle.phase is Phase.SERVING:
            self._turn()
        self._shell.leave()
        farewell_until = time.monotonic() + _FAREWELL_S
        self._hand_back([entry for entry in self._entries.values() if not entry.begun], "the prefill node is draining")
        while lifecycle.phase is Phase.DRAINING and (self._entries or time.monotonic() < farewell_until):
            self._turn()
        self._hand_back(list(self._entries.values()), "the prefill node is stopping")
        end_by = time.monotonic() + _END_S
        while time.monotonic() < (end_by if self._entries else farewell_until):
            self._turn()

    def _turn(self) -> None:
        for item in self._shell.receive(_IDLE_WAIT_S):
            self._take(item)
        self._housekeep(time.monotonic())
        self._start_step()

    def refresh_metrics(self) -> None:
        pool = self._prefill.pool
        self._metrics.prefill_pages.labels("free").set(pool.free_pages)
        self._metrics.prefill_pages.labels("used").set(pool.num_pages - pool.free_pages)
        self._metrics.prompt_tokens_waiting.set(self.queued_tokens)
        states = [entry.state for entry in list(self._entries.values())]
        for state in State:
            self._metrics.requests.labels(state.value).set(states.count(state))

    # --- messages ---

    def _take(self, item: tuple[Peer, Message] | Computed | Sent) -> None:
        match item:
            case Computed():
                self._on_computed(item)
            case Sent():
                self._on_sent(item)
            case (sender, PrefillRequest() as message):
                self._on_request(sender, message)
            case (sender, ChunkTaken() as message):
                self._on_chunk_taken(_key(sender, message), message.number)
            case (sender, Admitted() as message):
                self._on_admitted(_key(sender, message))
            case (sender, Abort() as message):
                self._on_abort(sender, _key(sender, message))
            case (sender, Holding() as message):
                self._on_holding(sender, message)
            case (_, Registered() | Refused() | HeartbeatAck()):
                pass
            case (sender, message):
                log.warning("not for a prefill node", kind=type(message).__name__, sender=sender.address)

    def _on_request(self, decode: Peer, request: PrefillRequest) -> None:
        key = _key(decode, request)
        if key in self._over:
            self._control.send(decode, self._over.quiesced(key))
            return
        self._control.send(decode, PrefillAccepted(request_id=request.request_id, epoch=request.epoch))
        if key in self._entries:
            return
        if refusal := self._refusal(decode, request):
            log.warning("refused", request_id=request.request_id, epoch=request.epoch, reason=refusal)
            self._control.send(decode, self._failed(key, refusal, in_flight=False))
            self._over.add(key)
            return
        entry = self._entries[key] = Entry.of(key, request, decode)
        self._watch_decode_nodes()
        self._prefill.add(entry.job)
        log.info("queued", request_id=request.request_id, epoch=request.epoch, tokens=len(request.prompt_ids))

    def _refusal(self, decode: Peer, request: PrefillRequest) -> str | None:
        """Why a request is not taken, or None."""
        if not self._shell.lifecycle.serving:
            return "the prefill node is draining"
        if refusal := self._offer.refusal(request):
            return refusal
        if refusal := self._destinations.contradiction(decode, request.destination):
            return refusal
        if not self._sender.open(decode):
            return "this node sends to as many decode nodes as it can"
        return None

    def _on_chunk_taken(self, key: Key, number: int) -> None:
        if (entry := self._entries.get(key)) is not None and number in entry.untaken:
            entry.untaken.remove(number)
            self._control.answered(("chunk", key, number))

    def _on_admitted(self, key: Key) -> None:
        self._control.answered(("done", key))
        entry = self._entries.get(key)
        if entry is not None and entry.state is State.DONE:
            self._end(entry)

    def _on_abort(self, sender: Peer, key: Key) -> None:
        entry = self._entries.get(key)
        if entry is None:
            self._over.add(key)
            self._control.send(sender, self._over.quiesced(key))
        else:
            self._control.answered(("failed", key))
            entry.failure = None
            self._stop_entry(entry, failure=None)

    def _on_holding(self, sender: Peer, message: Holding) -> None:
        """Say how far the sender's requests are, and of which of them nothing is in flight here."""
        held = [(key, self._entries.get((sender.boot_id, *key))) for key in message.keys]
        self._control.send(
            sender,
            Progress(
                computed=tuple((*key, entry.job.computed) for key, entry in held if entry is not None),
                current_pass=self._passes if self._computing else None,
            ),
        )
        for answer in self._over.not_held(sender, [key for key, entry in held if entry is None]):
            self._control.send(sender, answer)

    # --- work ---

    def _start_step(self) -> None:
        """Start the next forward pass, and the sending of what it computes, layer by layer."""
        if self._computing or (step := self._prefill.plan()) is None:
            return
        self._computing = True
        self._passes += 1
        progress = self._compute.start(step)
        for job, chunk in step.chunks:
            entry = self._entries[job.key]
            entry.in_flight += 1
            self._send(entry, chunk.start, chunk.stop, progress)

    def _send(self, entry: Entry, start: int, stop: int, progress: ForwardProgress) -> None:
        assert entry.job.pages is not None
        entry.in_flight += 1
        self._sender.submit(
            Chunk(
                request_id=entry.request.request_id,
                epoch=entry.request.epoch,
                start=start,
                stop=stop,
                pages=entry.job.pages,
                slots=entry.slots,
                decode=entry.decode,
                destination=entry.request.destination,
                progress=progress,
                cancelled=lambda: entry.state is State.STOPPING,
            )
        )

    def _on_computed(self, computed: Computed) -> None:
        self._computing = False
        if computed.error is None:
            for chunk in self._prefill.complete(computed.step, computed.tokens):
                self._note_chunk(self._entries[chunk.job.key], chunk)
        for job, _ in computed.step.chunks:
            entry = self._entries[job.key]
            entry.in_flight -= 1
            if computed.error is not None:
                self._stop_entry(entry, failure=computed.error)
            else:
                self._advance(entry)

    def _note_chunk(self, entry: Entry, chunk: ComputedChunk[Key]) -> None:
        self._metrics.prompt_tokens.inc(chunk.stop - chunk.start)
        if entry.state is not State.COMPUTING:
            return
        if chunk.failure is not None:
            self._stop_entry(entry, failure=f"prefill failed: {chunk.failure}")
        elif chunk.token is not None:
            entry.token = token_message(chunk.token)
            entry.computed_at = time.monotonic()
            entry.move(State.SENDING)

    def _on_sent(self, sent: Sent) -> None:
        entry = self._entries[_key(sent.chunk.decode, sent.chunk)]
        if sent.in_flight:
            self._never_end(entry, sent)
            return
        entry.in_flight -= 1
        if sent.lingering:
            self._over.note_lingering(entry.key)
        if sent.error is None:
            self._note_landed(entry, sent)
        elif entry.state is not State.STOPPING:
            self._metrics.transfer_failures.labels("write").inc()
            self._stop_entry(entry, failure=f"transfer failed: {sent.error}")
            return
        self._advance(entry)

    def _never_end(self, entry: Entry, sent: Sent) -> None:
        """A write of it may be in flight until this process ends. So it stays, with its pages, and is never quiet."""
        log.error(
            "nobody knows whether a write has ended: its pages, and its slots at the decode node, are free when this "
            "process ends; restart it",
            request_id=entry.request.request_id,
            epoch=entry.request.epoch,
            decode=entry.decode.address,
        )
        if entry.state is not State.STOPPING:
            self._metrics.transfer_failures.labels("write").inc()
            self._stop_entry(entry, failure=f"transfer failed: {sent.error}")

    def _note_landed(self, entry: Entry, sent: Sent) -> None:
        """A chunk has landed. Its checksums can be verified while later chunks compute."""
        done = entry.landed(sent)
        self._metrics.transfer_bytes.inc(sent.num_bytes)
        self._metrics.transfer_descriptors.inc(sent.num_descriptors)
        self._metrics.transfer_seconds.observe(sent.seconds())
        if done is not None:
            self._control.repeat(("chunk", entry.key, done.number), entry.decode, done)

    def _advance(self, entry: Entry) -> None:
        """Go on with an entry once nothing of it is in flight: it has arrived, or it may end."""
        if entry.in_flight:
            return
        if entry.state is State.STOPPING:
            self._end_drained(entry)
        elif entry.state is State.SENDING:
            self._announce(entry)

    def _announce(self, entry: Entry) -> None:
        """Every write landed: say so until the decode node answers."""
        assert entry.computed_at is not None
        entry.move(State.DONE)
        self._control.repeat(("done", entry.key), entry.decode, entry.done(self._over.lingers(entry.key)))
        log.info(
            "sent",
            request_id=entry.request.request_id,
            epoch=entry.request.epoch,
            bytes=entry.num_bytes,
            descriptors=entry.num_descriptors,
            seconds=round(entry.seconds, 4),
            after_compute=round(time.monotonic() - entry.computed_at, 4),
            lingering=self._over.lingers(entry.key),
        )

    # --- endings ---

    def _stop_entry(self, entry: Entry, failure: str | None) -> None:
        """Post nothing more of it; it ends when what is posted has drained."""
        if entry.state is not State.STOPPING:
            entry.move(State.STOPPING)
            entry.failure = failure
            self._prefill.forget(entry.job)
            if failure is not None and entry.in_flight:
                # The decode node need not wait for the end of it to look elsewhere.
                failed = self._failed(entry.key, failure, in_flight=True)
                self._control.repeat(("failed", entry.key), entry.decode, failed)
        self._advance(entry)

    def _end_drained(self, entry: Entry) -> None:
        if entry.failure is None:
            self._control.send(entry.decode, self._over.quiesced(entry.key))
        else:
            self._control.send(entry.decode, self._failed(entry.key, entry.failure, in_flight=False))
        self._end(entry)
        log.info(
            "stopped",
            request_id=entry.request.request_id,
            epoch=entry.request.epoch,
            reason=entry.failure or "aborted",
            lingering=self._over.lingers(entry.key),
        )

    def _failed(self, key: Key, reason: str, in_flight: bool) -> PrefillFailed:
        leaving = not self._shell.lifecycle.serving
        return self._over.failed(key, reason, in_flight=in_flight, leaving=leaving)

    def _end(self, entry: Entry) -> None:
        """The one place where an entry's pages go back. Nothing is repeated of it any more."""
        self._control.answered(("done", entry.key))
        self._control.answered(("failed", entry.key))
        for number in entry.untaken:
            self._control.answered(("chunk", entry.key, number))
        self._prefill.release(entry.job)
        del self._entries[entry.key]
        self._over.add(entry.key)

    def _hand_back(self, entries: list[Entry], reason: str) -> None:
        """Give these up, so that their decode nodes go elsewhere at once."""
        for entry in entries:
            self._stop_entry(entry, failure=reason)

    def _housekeep(self, now: float) -> None:
        """Give up what no decode node asks for any more or what takes too long, and threads that no request needs."""
        if now < self._housekeeping_at:
            return
        self._housekeeping_at = now + 1.0
        for entry in list(self._entries.values()):
            if entry.state is State.STOPPING:
                continue
            if self._decode_nodes.is_silent(entry.decode, now):
                log.warning("decode node is silent", request_id=entry.request.request_id, decode=entry.decode.address)
                self._stop_entry(entry, failure="the decode node is silent")
            elif entry.state is State.SENDING and now - (entry.computed_at or now) > self._transfer_timeout:
                self._metrics.transfer_failures.labels("timeout").inc()
                self._stop_entry(entry, failure=f"transfer took longer than {self._transfer_timeout:g} s")
        self._watch_decode_nodes()
        self._sender.keep_only({entry.decode.boot_id for entry in self._entries.values()})

    def _watch_decode_nodes(self) -> None:
        self._decode_nodes.watch(entry.decode for entry in self._entries.values())


def _key(decode: Peer, what: PrefillRequest | ChunkTaken | Admitted | Abort | Chunk) -> Key:
    return decode.boot_id, what.request_id, what.epoch
