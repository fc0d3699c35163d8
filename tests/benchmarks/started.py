"""Benchmarks as processes of their own, which do not outlive their test, whatever becomes of that."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil


def descendants(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def all_gone(processes: set[psutil.Process]) -> bool:
    return not any(_runs(process) for process in processes)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator["subprocess.Popen[Any]"]:
    """The command, until the end of the context: what still runs of it then, and below it, is killed."""
    process = subprocess.Popen(command, **options)
    try:
        yield process
    finally:
        below = descendants(process.pid)
        process.kill()
        process.wait()
        for one in below:
            with suppress(psutil.NoSuchProcess):
                one.kill()
