"""The decode node's side of a prover process."""

import json
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from control.grammar import Grammar
from engine.grammar import GrammarError
from engine.grammar.vocabulary import Vocabulary

_START_S = 10.0
_LOOK_S = 0.02
_PATIENCE = 6
"""A proof may take that many times as long as its processor time."""
_DEATHS: dict[int, str] = {
    signal.SIGSEGV: "it is nested too deep",
    signal.SIGABRT: "it takes too much memory or is nested too deep",
}


class TooSlow(Exception):
    """The proof did not end in its time."""


class ProverStopped(Exception):
    """There is no process that could prove anything."""


@dataclass(frozen=True)
class Proof:
    """text: what llguidance's matcher is to be given. held_bytes: what it held with a small vocabulary."""

    text: str
    held_bytes: int


class Prover:
    """A process that proves one grammar at a time (`proofs.py`), and a spare one. Only `close` may come from another
    thread.
    """

    def __init__(self, vocabulary: Vocabulary, nice: int = 0) -> None:
        """nice: how much the processes let others go first."""
        self._first_line = _line(
            {
                "vocab_size": vocabulary.vocab_size,
                "added_tokens": list(vocabulary.added_tokens.items()),
                "stop_token_ids": vocabulary.stop_token_ids,
                "nice": nice,
            }
        )
        self._lock = threading.Lock()
        """Protects the processes: `close` comes from another thread."""
        self._processes: list[subprocess.Popen[bytes]] = []
        """The one that is used and the one that takes its place."""
        self._ready: subprocess.Popen[bytes] | None = None
        """The one that has answered its first line."""
        self._closed = False

    def start(self) -> None:
        """Start the process and the spare one, unless they run. Does not wait until they are ready."""
        with self._lock:
            while not self._closed and len(self._processes) < 2:
                command = [sys.executable, "-m", "engine.grammar.proofs"]
                self._processes.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
                )

    def prove(self, grammar: Grammar, seconds: float) -> Proof:
        """Raises GrammarError, TooSlow after that many seconds of processor time, or ProverStopped."""
        self.start()
        with self._lock:
            if self._closed:
                raise ProverStopped("the node stops")
            process = self._processes[0]
        try:
            if self._ready is not process and self._ask(process, self._first_line, _START_S) is not None:
                self._ready = process
            line = _line({"grammar": grammar.model_dump_json(), "seconds": seconds})
            answer = self._ask(process, line, seconds) if self._ready is process else None
        except TooSlow:
            self._end(process)
            if self._ready is not process:  # it has not come to the grammar
                raise ProverStopped("the process that compiles grammars does not start in time") from None
            raise
        if answer is None:
            self._end(process)
            status = process.wait()
            # Somebody else killed it, as the kernel does where memory is short.
            if self._closed or self._ready is not process or status == -signal.SIGKILL:
                raise ProverStopped("the process that compiles grammars ends")
            cause = _DEATHS.get(-status, f"the compiler ends with status {status}")
            raise GrammarError(f"it cannot be compiled: {cause}")
        if "error" in answer:
            raise GrammarError(answer["error"])
        return Proof(answer["text"], answer["held_bytes"])

    def _ask(self, process: "subprocess.Popen[bytes]", line: bytes, seconds: float) -> dict[str, Any] | None:
        """The answer to a line; None if the process died. Raises TooSlow."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            spent = _processor_s(process.pid)
            began = time.monotonic()
            process.stdin.write(line)
            process.stdin.flush()
            while not select.select([process.stdout], [], [], _LOOK_S)[0]:
                if _processor_s(process.pid) - spent > seconds or time.monotonic() - began > _PATIENCE * seconds:
                    raise TooSlow
            answer = process.stdout.readline()
        except (BrokenPipeError, ValueError, psutil.NoSuchProcess):
            # It died, or `close` has closed the pipes.
            return None
        return dict(json.loads(answer)) if answer else None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            self._end(process)

    def _end(self, process: "subprocess.Popen[bytes]") -> None:
        with self._lock:
            if process in self._processes:
                self._processes.remove(process)
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            # What was not written yet is of no use to a dead process.
            with suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


def _processor_s(pid: int) -> float:
    """Processor time that a process has used: unlike the time that has passed, it is the same on a busy machine."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def _line(value: dict[str, object]) -> bytes:
    return json.dumps(value).encode() + b"\n"
