"""What is shown while weights are loaded."""

import io
import sys

import pytest
import structlog

from model.progress import LoadProgress

GIB = 1 << 30


def test_a_log_has_a_line_for_every_tenth_and_one_for_the_end() -> None:
    progress = LoadProgress("loading weights")
    with structlog.testing.capture_logs() as logs:
        progress.begin(40 * GIB)
        for _ in range(80):
            progress.advance(GIB // 2)
        progress.end()
    assert [entry["done"] for entry in logs[:-1]] == [f"{tenth}0%" for tenth in range(1, 10)]
    assert (logs[-1]["event"], logs[-1]["read"]) == ("loading weights: done", "40.00 GiB")


def test_little_is_loaded_with_one_line() -> None:
    progress = LoadProgress("loading weights")
    with structlog.testing.capture_logs() as logs:
        progress.begin(10)
        progress.advance(9)
        progress.end()
    assert [entry["event"] for entry in logs] == ["loading weights: given up"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_instead_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    progress = LoadProgress("loading weights")
    with structlog.testing.capture_logs() as logs:
        progress.begin(40 * GIB)
        progress.advance(20 * GIB)
        progress.advance(20 * GIB)
        progress.end()
    assert len(logs) == 1
    assert "loading weights" in terminal.getvalue()
    assert "42.9/42.9 GB" in terminal.getvalue()
