"""Copies of scattered pieces: every byte of them, and no other."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.prefill_node.sending import wait_until
from transfer import copy_runs as copy_runs_module
from transfer.copy_runs import JointCopy, copy_runs, stream_runs
from transfer.planner import Descriptors, all_within


def byte_by_byte(source: np.ndarray, destination: np.ndarray) -> Descriptors:
    """A piece for each byte."""
    at = np.arange(len(source))
    return Descriptors(source.ctypes.data + at, destination.ctypes.data + at, np.ones_like(at))


def copy_together(batch: Descriptors) -> None:
    """By three threads, to addresses that lie 48 bytes further on here."""
    copy = JointCopy(batch._replace(destinations=batch.destinations - 48), shift=48)
    with ThreadPoolExecutor(2) as helpers:
        for _ in range(2):
            helpers.submit(copy.help)
        copy.finish()


every = pytest.mark.parametrize("copy", [copy_runs, stream_runs, copy_together])
pieces = st.lists(st.tuples(st.integers(0, 70), st.integers(0, 300) | st.integers(1000, 5000)), max_size=100)


@every
@given(pieces)
def test_pieces_of_any_length_and_alignment_arrive(
    copy: Callable[[Descriptors], None], pieces: list[tuple[int, int]]
) -> None:
    """pieces: (bytes before it, its length)."""
    gaps, lengths = np.asarray(pieces, dtype=np.int64).reshape(-1, 2).T
    ends = np.cumsum(gaps + lengths)
    total = int(ends[-1]) + 64 if len(ends) else 64
    places = ends - lengths
    elsewhere = np.random.default_rng(total).permutation(len(places))

    source = np.random.default_rng(total).integers(0, 256, total, dtype=np.uint8)
    destination = np.zeros(total, dtype=np.uint8)
    expected = destination.copy()
    for at, length in zip(places.tolist(), lengths.tolist(), strict=True):
        expected[at : at + length] = source[total - at - length : total - at]

    copy(
        Descriptors(
            source.ctypes.data + total - places[elsewhere] - lengths[elsewhere],
            destination.ctypes.data + places[elsewhere],
            lengths[elsewhere],
        )
    )

    np.testing.assert_array_equal(destination, expected)


def test_when_a_copy_is_finished_what_others_took_of_it_is_there_too() -> None:
    rng = np.random.default_rng(0)
    with ThreadPoolExecutor(3) as helpers:
        for _ in range(200):
            source = rng.integers(0, 256, 500 * 100, dtype=np.uint8)
            destination = np.zeros_like(source)
            starts = rng.permutation(500) * 100
            copy = JointCopy(
                Descriptors(source.ctypes.data + starts, destination.ctypes.data + starts, np.full(500, 100)), shift=0
            )
            late = [helpers.submit(copy.help) for _ in range(3)]
            copy.finish()
            np.testing.assert_array_equal(destination, source)
            wait(late)
            copy.finish()


def test_a_copy_with_a_failed_thread_is_over_when_the_others_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What they write to may be used for something else then."""
    source, destination = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    copy = JointCopy(byte_by_byte(source, destination), shift=0)
    is_copying = threading.Event()
    waiting, real = threading.get_ident(), copy_runs_module._copy_shares

    def shares(*arguments: Any) -> int:
        if threading.get_ident() == waiting:
            raise MemoryError
        is_copying.set()
        wait_until(lambda: copy._over)
        return int(real(*arguments))

    monkeypatch.setattr(copy_runs_module, "_copy_shares", shares)
    with ThreadPoolExecutor(1) as helpers:
        helpers.submit(copy.help)
        assert is_copying.wait(10)
        with pytest.raises(MemoryError):
            copy.finish()
        np.testing.assert_array_equal(destination, source)
    monkeypatch.undo()
    destination[:] = 0
    copy.help()
    assert not destination.any(), "who comes late copies nothing"


def test_a_copy_of_which_a_helper_fails_is_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = np.arange(100, dtype=np.uint8), np.zeros(100, dtype=np.uint8)
    copy = JointCopy(byte_by_byte(source, destination), shift=0)
    real = copy_runs_module._copy_shares

    def fails(*arguments: Any) -> int:
        real(*(column[:1] for column in arguments[0:3]), *arguments[3:])
        raise MemoryError

    with monkeypatch.context() as broken:
        broken.setattr(copy_runs_module, "_copy_shares", fails)
        with pytest.raises(MemoryError):
            copy.help()
    with pytest.raises(RuntimeError, match="of 100 pieces were copied"):
        copy.finish()


@pytest.mark.parametrize(
    ("start", "length", "within"),
    [(0, 10, True), (90, 10, True), (100, 0, True), (91, 10, False), (-1, 5, False), (0, 101, False)],
)
def test_destinations_within_a_piece_of_memory(start: int, length: int, within: bool) -> None:
    batch = Descriptors(*np.array([(0, 1000, 10), (0, 1000 + start, length)], dtype=np.int64).T)
    assert all_within(batch.destinations, batch.lengths, 1000, 100) is within


def import_with_cache(directory: Path) -> list[int]:
    """In a process of its own: how many of the loops were found in the cache, and how many were compiled."""
    code = (
        "from transfer import copy_runs as it; loops = [it._copy_all, it._stream_all, it._copy_shares];"
        "print(*(sum(getattr(one.stats, which).total() for one in loops) for which in ('cache_hits', 'cache_misses')))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(directory)}
    printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return [int(word) for word in printed.stdout.split()]


@pytest.mark.slow
def test_loops_are_compiled_once_and_again_where_what_was_kept_is_damaged(tmp_path: Path) -> None:
    assert import_with_cache(tmp_path) == [0, 3]
    assert import_with_cache(tmp_path) == [3, 0]
    for code in tmp_path.rglob("*.nbc"):
        code.write_bytes(b"damaged")
    assert import_with_cache(tmp_path)[0] == 0
    for index in tmp_path.rglob("*.nbi"):
        index.write_bytes(b"damaged")
    assert import_with_cache(tmp_path) == [0, 3]


def test_loops_are_compiled_where_nothing_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = numba.njit

    def njit(signature: str, cache: bool = False, **options: bool) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(signature, **options)

    monkeypatch.setattr(numba, "njit", njit)
    with pytest.warns(RuntimeWarning, match="not kept on disk: .*no locator"):
        add = copy_runs_module._compiled("int64(int64)")(lambda number: number + 1)
    assert add(4) == 5
