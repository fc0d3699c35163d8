"""A prefill engine whose passes, fetches and writes end when the test says so, in any order."""

from collections.abc import Callable, Sequence

from control.messages import AttemptId, FetchDone, FetchGrant, FetchRefused, FetchRequest, PrefillFailed
from engine.chunked import PrefillStep
from prefill_node.arrival import AwaitedPrefixes, NothingLeft
from prefill_node.compute import Computed
from prefill_node.costs import ComputeCost
from prefill_node.engine import PrefillUpdate
from prefill_node.fetch import Fetch, FetchReport
from prefill_node.job import TransferJob
from prefill_node.outgoing import Chunk, SendReport
from prefill_node.progress import ForwardProgress
from tests.prefill_node.fakes import LAYOUT
from tests.prefill_node.sending import CPU
from tests.prefill_node.sequences import PrefillHarness, new_cache
from transfer.memory import Checksums


class HeldCompute:
    """See StepCompute. Nothing is computed."""

    def __init__(self) -> None:
        self.step: PrefillStep[TransferJob] | None = None

    def start(self, step: PrefillStep[TransferJob]) -> ForwardProgress:
        assert self.step is None
        assert all(job.pages is not None for job, _ in step.chunks)
        self.step = step
        arriving = {job: job.arriving.arrival for job, _ in step.chunks if job.arriving is not None}
        self._awaited = AwaitedPrefixes(arriving, len(step.chunks), patience=0.0)
        return ForwardProgress(CPU)

    def between_steps(self, work: Callable[[], None], on_end: Callable[[str | None], None]) -> None:
        raise AssertionError("this engine is no group")

    def stop(self, timeout: float) -> bool:
        return True

    def end(self, error: str | None) -> Computed:
        """The pass waits for no layer that is not here."""
        assert self.step is not None
        step, self.step = self.step, None
        try:
            for layer in range(LAYOUT.num_layers):
                self._awaited.wait(layer)
        except NothingLeft:
            pass
        return Computed(step, error, void=self._awaited.void)


class HeldSender:
    """See ChunkSender."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def open(self, decode: object) -> bool:
        return True

    def submit(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)

    def keep_only(self, boot_ids: set[str]) -> None:
        pass

    def stop(self, timeout: float) -> bool:
        return True


class HeldFetcher:
    """See PrefixFetcher."""

    def __init__(self) -> None:
        self.fetches: list[Fetch] = []

    def submit(self, fetch: Fetch) -> None:
        fetch.arrival.begin()
        self.fetches.append(fetch)

    def keep_only(self, boot_ids: set[str]) -> None:
        pass


class SlowPasses(ComputeCost):
    """The estimate that a pass takes long, whatever passes take."""

    def of_pass(self, start: int, stop: int) -> float:
        return 1e9

    def observe(self, ranges: Sequence[tuple[int, int]], seconds: float) -> None:
        pass


class HeldEngine(PrefillHarness):
    """Fetches whatever it may, and lets a job join a pass as soon as one layer of its prefix is here."""

    def __init__(self, num_pages: int = 48, chunk_size: int = 64) -> None:
        super().__init__(new_cache(num_pages), chunk_size, fetch_policy="always")
        self.engine._compute.stop(5)
        self.computing, self.sending, self.fetching = HeldCompute(), HeldSender(), HeldFetcher()
        self.engine._compute, self.engine._sender = self.computing, self.sending
        self.engine._fetches.fetcher = self.fetching
        self.engine._fetches.compute_cost = SlowPasses(chunk_size)
        self.asked: dict[AttemptId, FetchRequest] = {}
        """Fetches that the decode node has not answered."""

    def poll(self) -> list[PrefillUpdate]:
        said = self.engine.poll()
        self.updates += said
        for update in said:
            if isinstance(update, FetchRequest):
                self.asked[update.attempt] = update
            elif isinstance(update, FetchDone) or (isinstance(update, PrefillFailed) and not update.in_flight):
                self.asked.pop(update.attempt, None)
        return said

    def end_pass(self, error: str | None = None) -> None:
        self.engine._report(self.computing.end(error))

    def answer(self, attempt: AttemptId, is_granted: bool) -> None:
        asked = self.asked.pop(attempt)
        if is_granted:
            extents = ((0, asked.stop - asked.start),)
            grant = FetchGrant(
                attempt=attempt, start=asked.start, stop=asked.stop, extents=extents, checksums=Checksums()
            )
            self.engine.fetch_answered(grant)
        else:
            self.engine.fetch_answered(FetchRefused(attempt=attempt, reason="it is not here any more"))

    def end_fetch(self, number: int, error: str | None = None) -> None:
        fetch = self.fetching.fetches.pop(number)
        if error is not None:
            fetch.arrival.give_up()
        self.engine._report(FetchReport(fetch, error=error, failure="read" if error is not None else None))

    def end_chunk(self, number: int, error: str | None = None) -> None:
        chunk = self.sending.chunks.pop(number)
        self.engine._report(SendReport(chunk, error="aborted" if chunk.cancelled() else error))

    def close(self) -> None:
        self.engine.close(timeout=5)

    def run_out(self) -> None:
        """Everything ends well; afterwards the engine must be idle, with all of its pages."""
        for _ in range(1000):
            self.poll()
            if not self.engine.attempts:
                break
            for attempt in list(self.asked):
                self.answer(attempt, is_granted=True)
            while self.fetching.fetches:
                self.end_fetch(0)
            if self.computing.step is not None:
                self.end_pass()
            while self.sending.chunks:
                self.end_chunk(0)
            for attempt in self.engine.attempts:
                self.engine.release(attempt)
        assert self.engine.attempts == []
        assert self.computing.step is None
        self.cache.check_idle()
        self.cache.check_integrity()
