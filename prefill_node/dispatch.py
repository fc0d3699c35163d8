"""Divides steps, chunks and prefixes among the workers of all ranks, and puts together what they report.

Each chunk of a step is sent in the blocks in which ranks compute it, and a prefix is read in as many blocks as ranks.
Of either there is one report, when every rank has reported its block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from control.messages import FetchGrant, Peer
from engine.chunked import PrefillStep
from model.passes import PrefillChunk
from model.shard import Shard
from prefill_node import orders
from prefill_node.attempt import HeldAttempt, HeldState
from prefill_node.division import checksums_of_blocks, divide
from prefill_node.orders import Order, Report, Step, StepChunk, TransferReport
from ranks.executor import Executor
from transfer.planner import expand_extents


@dataclass(eq=False)
class Transfer:
    """A chunk that is sent, or a prefix that is read, up to position `stop`. missing: ranks that have not reported."""

    work: int
    attempt: HeldAttempt
    stop: int
    is_read: bool = False
    missing: set[int] = field(default_factory=set)
    reports: list[TransferReport] = field(default_factory=list)


class Dispatch:
    """Gives numbers to what is in flight of attempts (`HeldAttempt.in_flight`). The planner's loop calls it."""

    def __init__(self, executor: Executor[Order, Report]) -> None:
        self.world_size = executor.world_size
        self.served: set[Peer] = set()
        """The decode nodes that workers know of."""
        self._executor = executor
        self._numbers = count(1)
        self._transfers: dict[int, Transfer] = {}

    def start_step(self, step: PrefillStep[HeldAttempt]) -> None:
        """Have all ranks compute a step, and each send its blocks of it as layers are done."""
        number = next(self._numbers)
        transfers: dict[int, Transfer] = {}
        """By number of the chunk: those that are sent."""
        for at, (attempt, chunk) in enumerate(step.chunks):
            attempt.in_flight.add(number)
            attempt.handed = chunk.stop
            if attempt.state is HeldState.JOINED and attempt.fetch is not None:
                attempt.fetch.withheld.append((chunk.start, chunk.stop, number))
            elif chunk.stop > attempt.start:
                transfers[at] = self._new_transfer(attempt, chunk.stop)
        chunks = tuple(_step_chunk(attempt, chunk) for attempt, chunk in step.chunks)
        patience = max((attempt.fetch.patience for attempt, _ in step.chunks if attempt.fetch is not None), default=0.0)
        blocks = [self._blocks(rank, number, step, transfers) for rank in range(self.world_size)]
        for rank in reversed(range(self.world_size)):
            self._executor.order(rank, Step(number, chunks, blocks[rank], patience))

    def start_gather(self, prefixes: Sequence[orders.DividedPrefix]) -> None:
        """Have all ranks exchange what they have read of prefixes, in a step of its own."""
        self._executor.order_all(orders.Gather(next(self._numbers), tuple(prefixes)))

    def send(self, attempt: HeldAttempt, start: int, stop: int, step: int | None = None) -> None:
        """Have rank 0 send positions [start, stop), but for those that the decode node has. step: see BlockToSend."""
        if stop > attempt.start:
            transfer = self._new_transfer(attempt, stop)
            transfer.missing.add(0)
            self._executor.order(0, attempt.write(transfer.work, max(start, attempt.start), stop, step))

    def read(self, attempt: HeldAttempt, grant: FetchGrant, steps_ended: int) -> tuple[int, tuple[int, ...]]:
        """Have ranks read what the decode node lends, each a block. Returns its number, and bounds as `DividedPrefix`.

        steps_ended: at rank 0.
        """
        assert attempt.pages is not None
        bounds = divide(grant.checksums, grant.start, grant.stop, self.world_size)
        transfer = self._new_transfer(attempt, grant.stop, is_read=True)
        slots, checksums = expand_extents(grant.extents), checksums_of_blocks(grant.checksums, bounds)
        for rank, (start, stop) in enumerate(pairwise(bounds)):
            if start < stop:
                transfer.missing.add(rank)
                block = orders.BlockToRead(
                    work=transfer.work,
                    attempt=attempt.id,
                    decode=attempt.decode,
                    destination=attempt.destination,
                    start=start,
                    stop=stop,
                    pages=attempt.pages,
                    slots=slots[start - grant.start : stop - grant.start],
                    checksums=checksums[rank],
                    after=steps_ended,
                    reports_layers=self.world_size == 1,
                )
                self._executor.order(rank, block)
        return transfer.work, bounds

    def cancel(self, numbers: Sequence[int]) -> None:
        """Have nothing more posted of these chunks and prefixes."""
        if numbers:
            self._executor.order_all(orders.CancelTransfers(tuple(numbers)))

    def serve(self, decode_nodes: set[Peer]) -> None:
        """These decode nodes have attempts here, and no others."""
        if decode_nodes != self.served:
            self.served = decode_nodes
            self._executor.order_all(orders.Serve(tuple(decode_nodes)))

    def attempt_of(self, work: int) -> HeldAttempt | None:
        """Of which a chunk is being sent, or a prefix read."""
        transfer = self._transfers.get(work)
        return None if transfer is None else transfer.attempt

    def block_ended(self, rank: int, report: TransferReport) -> tuple[Transfer, TransferReport] | None:
        """Count a report. Returns the transfer that it completes, with one report of all ranks, or None.

        Raises KeyError for a block that is not expected: each is reported once.
        """
        transfer = self._transfers[report.work]
        transfer.missing.remove(rank)
        transfer.reports.append(report)
        if transfer.missing:
            if report.error is not None:
                self.cancel([report.work])
            return None
        del self._transfers[report.work]
        return transfer, orders.merged(transfer.reports)

    def _new_transfer(self, attempt: HeldAttempt, stop: int, is_read: bool = False) -> Transfer:
        work = next(self._numbers)
        attempt.in_flight.add(work)
        transfer = self._transfers[work] = Transfer(work, attempt, stop, is_read)
        return transfer

    def _blocks(
        self, rank: int, number: int, step: PrefillStep[HeldAttempt], transfers: Mapping[int, Transfer]
    ) -> tuple[orders.BlockToSend, ...]:
        """What a rank sends of a step."""
        blocks = []
        lengths = [len(chunk.token_ids) for _, chunk in step.chunks]
        for at, tokens in Shard(rank, self.world_size).blocks(lengths):
            attempt, chunk = step.chunks[at]
            start, stop = max(chunk.start + tokens.start, attempt.start), chunk.start + tokens.stop
            if at in transfers and start < stop:
                transfers[at].missing.add(rank)
                blocks.append(attempt.write(transfers[at].work, start, stop, number))
        return tuple(blocks)


def _step_chunk(attempt: HeldAttempt, chunk: PrefillChunk) -> StepChunk:
    assert attempt.pages is not None
    return StepChunk(
        chunk.token_ids.numpy(),
        chunk.next_ids.numpy(),
        chunk.start,
        chunk.sequence_length,
        attempt.pages,
        alternatives=attempt.prompt_logprobs,
        awaits=attempt.fetch.work if attempt.state is HeldState.JOINED and attempt.fetch is not None else None,
    )
