"""Compiles grammars on threads, so that one that takes long delays nobody else."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from hashlib import sha256
from queue import Empty, Full, Queue

import structlog

from control.grammar import Grammar
from engine.grammar.errors import CompilerBusy, GrammarError
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


class GrammarCompiler:
    """Turns grammars into compiled ones, or into a GrammarError. Any thread may use it.

    Each of its threads has a `Prover`, a process that tries the grammar first and that is killed if it takes too long.
    There are two lanes: what the quick one does not finish in its short time begins anew in the slow one, which has one
    thread. So hostile grammars wait for each other, and others wait for them `quick_seconds` at most, each time one is
    before them. Equal grammars are compiled once.
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
        self._quick: Queue[_Job | None] = Queue(self._limits.waiting)
        self._slow: Queue[_Job | None] = Queue(self._limits.waiting)
        self._provers: list[Prover] = []
        self._threads: list[threading.Thread] = []
        for number in range(self._limits.threads):
            self._add_thread(f"grammar-{number}", self._quick, self._limits.quick_seconds, self._to_slow_lane)
        self._add_thread("grammar-slow", self._slow, self._limits.seconds, self._refuse)

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
        for prover in self._provers:
            prover.close()
        for queue in (self._quick, self._slow):
            while True:
                try:
                    if job := queue.get_nowait():
                        self._give_up(job, "the node stops")
                except Empty:
                    break
        for thread in self._threads:
            (self._slow if thread.name == "grammar-slow" else self._quick).put(None)
        for thread in self._threads:
            thread.join()

    def _add_thread(
        self, name: str, jobs: "Queue[_Job | None]", seconds: float, too_slow: Callable[[_Job], None]
    ) -> None:
        prover = Prover(self._vocabulary, nice=10 if jobs is self._slow else 0)
        thread = threading.Thread(target=self._work, args=(prover, jobs, seconds, too_slow), name=name, daemon=True)
        self._provers.append(prover)
        self._threads.append(thread)
        thread.start()

    def _work(
        self, prover: Prover, jobs: "Queue[_Job | None]", seconds: float, too_slow: Callable[[_Job], None]
    ) -> None:
        job: _Job | None
        while (job := self._next(prover, jobs)) is not None:
            try:
                proof = prover.prove(job.grammar, seconds)
                compiled = CompiledGrammar(self._vocabulary, proof.text)
                self._finish(job, compiled, proof.held_bytes + len(proof.text) + _LEAST_BYTES)
            except TooSlow:
                too_slow(job)
            except GrammarError as error:
                self._finish(job, error, _LEAST_BYTES)
            except ProverStopped as error:
                log.warning("a grammar was not compiled", error=str(error))
                self._give_up(job, str(error))
            except Exception as error:
                log.exception("compiling a grammar failed")
                self._give_up(job, f"grammars cannot be compiled: {error!r}")
        prover.close()

    def _next(self, prover: Prover, jobs: "Queue[_Job | None]") -> _Job | None:
        """Wait for a job, with a process ready for it if one can be had."""
        try:
            prover.start()
        except OSError:
            log.exception("cannot start the process that compiles grammars")
        return jobs.get()

    def _to_slow_lane(self, job: _Job) -> None:
        self._enqueue(self._slow, job)

    def _refuse(self, job: _Job) -> None:
        error = GrammarError(f"the grammar takes more than {self._limits.seconds:g} s to compile")
        self._finish(job, error, _LEAST_BYTES)

    def _enqueue(self, jobs: "Queue[_Job | None]", job: _Job) -> None:
        try:
            if self._closed:
                raise Full
            jobs.put_nowait(job)
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
