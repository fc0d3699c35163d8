"""Compiles grammars on threads, so that one that takes long delays nobody else."""

import threading
from collections import OrderedDict
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from queue import Empty, Full, Queue

import structlog

from control.grammar import Grammar
from engine.grammar import CompilerBusy, GrammarError
from engine.grammar.prover import Prover, ProverStopped, TooSlow
from engine.grammar.state import CompiledGrammar
from engine.grammar.vocabulary import Vocabulary

log = structlog.get_logger(__name__)

_LEAST_BYTES = 2**16
"""What an entry of the cache is counted with at least."""


@dataclass(frozen=True)
class CompilerLimits:
    """Bounds on what clients may ask for.

    seconds: of processor time that a grammar may take. quick_seconds: after which it goes on in the slow lane. threads:
    of the quick lane. waiting: grammars in each queue; more are refused. entries, cache_bytes: of the cache, by what
    the proofs held.
    """

    seconds: float = 5.0
    quick_seconds: float = 0.25
    threads: int = 2
    waiting: int = 256
    entries: int = 256
    cache_bytes: int = 512 * 2**20


@dataclass(frozen=True)
class _Job:
    key: bytes
    grammar: Grammar
    future: "Future[CompiledGrammar]"


@dataclass(frozen=True, eq=False)
class _Lane:
    """Threads that take jobs from one queue. seconds: of processor time for a grammar. nice: of their processes."""

    jobs: "Queue[_Job | None]"
    seconds: float
    threads: int
    nice: int


class GrammarCompiler:
    """Turns grammars into compiled ones, or into a GrammarError. Any thread may use it.

    Each of its threads has a `Prover`, a process that tries the grammar first and is killed if it takes too long. What
    the quick lane does not finish in its time starts again in the slow lane, which has one thread. So a hostile grammar
    delays others by `quick_seconds` at most. Equal grammars are compiled once.
    """

    def __init__(self, vocabulary: Vocabulary, limits: CompilerLimits | None = None) -> None:
        self._vocabulary = vocabulary
        self._limits = limits or CompilerLimits()
        self._lock = threading.Lock()
        """Protects the cache and the jobs under way."""
        self._cache: OrderedDict[bytes, tuple[CompiledGrammar | GrammarError, int]] = OrderedDict()
        self._cached_bytes = 0
        self._under_way: dict[bytes, Future[CompiledGrammar]] = {}
        self._closed = False
        limits = self._limits
        self._quick = _Lane(Queue(limits.waiting), limits.quick_seconds, limits.threads, nice=0)
        self._slow = _Lane(Queue(limits.waiting), limits.seconds, threads=1, nice=10)
        self._workers = [
            (lane, prover, threading.Thread(target=self._work, args=(lane, prover), name="grammar", daemon=True))
            for lane in (self._quick, self._slow)
            for prover in (Prover(vocabulary, lane.nice) for _ in range(lane.threads))
        ]
        for _, _, thread in self._workers:
            thread.start()

    def submit(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Begin to compile a grammar, if it is not compiled already. Does not wait.

        The future has the compiled grammar, a GrammarError, or CompilerBusy.
        """
        key = sha256(grammar.model_dump_json().encode()).digest()
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return _answer(Future(), self._cache[key][0])
            if key in self._under_way:
                return self._under_way[key]
            job = _Job(key, grammar, Future())
            job.future.set_running_or_notify_cancel()
            self._under_way[key] = job.future
        self._enqueue(self._quick, job)
        return job.future

    def close(self) -> None:
        """End the threads and their processes. Grammars that are not compiled yet get CompilerBusy."""
        self._closed = True
        for _, prover, _ in self._workers:
            prover.close()
        for lane in (self._quick, self._slow):
            with suppress(Empty):
                while True:
                    if job := lane.jobs.get_nowait():
                        self._give_up(job, "the node stops")
        for lane, _, _ in self._workers:
            lane.jobs.put(None)
        for _, _, thread in self._workers:
            thread.join()

    def _work(self, lane: "_Lane", prover: Prover) -> None:
        while (job := self._next(prover, lane)) is not None:
            try:
                proof = prover.prove(job.grammar, lane.seconds)
                compiled = CompiledGrammar(self._vocabulary, proof.text)
                self._finish(job, compiled, proof.held_bytes + len(proof.text) + _LEAST_BYTES)
            except TooSlow:
                if lane is self._quick:
                    self._enqueue(self._slow, job)
                else:
                    error = GrammarError(f"the grammar takes more than {lane.seconds:g} s to compile")
                    self._finish(job, error, _LEAST_BYTES)
            except GrammarError as error:
                self._finish(job, error, _LEAST_BYTES)
            except ProverStopped as error:
                log.warning("a grammar was not compiled", error=str(error))
                self._give_up(job, str(error))
            except Exception as error:
                log.exception("compiling a grammar failed")
                self._give_up(job, f"grammars cannot be compiled: {error!r}")
        prover.close()

    def _next(self, prover: Prover, lane: "_Lane") -> _Job | None:
        """Wait for a job, with a process ready for it if one can be had."""
        try:
            prover.start()
        except OSError:
            log.exception("cannot start the process that compiles grammars")
        return lane.jobs.get()

    def _enqueue(self, lane: "_Lane", job: _Job) -> None:
        try:
            if self._closed:
                raise Full
            lane.jobs.put_nowait(job)
        except Full:
            self._give_up(job, "too many grammars are waiting to be compiled")

    def _finish(self, job: _Job, result: CompiledGrammar | GrammarError, size: int) -> None:
        """Answer a job for good, and remember the answer."""
        limits = self._limits
        with self._lock:
            self._under_way.pop(job.key, None)
            self._cache[job.key] = result, size
            self._cached_bytes += size
            while len(self._cache) > 1 and (
                len(self._cache) > limits.entries or self._cached_bytes > limits.cache_bytes
            ):
                self._cached_bytes -= self._cache.popitem(last=False)[1][1]
        _answer(job.future, result)

    def _give_up(self, job: _Job, reason: str) -> None:
        with self._lock:
            self._under_way.pop(job.key, None)
        job.future.set_exception(CompilerBusy(reason))


def _answer(future: "Future[CompiledGrammar]", result: CompiledGrammar | GrammarError) -> "Future[CompiledGrammar]":
    if isinstance(result, GrammarError):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future
