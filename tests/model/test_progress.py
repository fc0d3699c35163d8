"""What is shown while weights are loaded."""

import io
import sys

import pytest
import structlog

from model.loader import load_progress

GIB = 1 << 30


def test_a_log_has_a_line_for_every_tenth_and_one_for_the_end() -> None:
    with structlog.testing.capture_logs() as logs, load_progress("loading weights", 40 * GIB) as advance:
        for _ in range(80):
            advance(GIB // 2)
    assert [entry["done"] for entry in logs[:-1]] == [f"{tenth}0%" for tenth in range(1, 10)]
    assert (logs[-1]["event"], logs[-1]["read"]) == ("loading weights: done", "40.00 GiB")


def test_little_is_loaded_with_one_line() -> None:
    with structlog.testing.capture_logs() as logs, load_progress("loading weights", 10) as advance:
        advance(9)
    assert [entry["event"] for entry in logs] == ["loading weights: given up"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_a_bar_instead_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with structlog.testing.capture_logs() as logs, load_progress("loading weights", 40 * GIB) as advance:
        advance(20 * GIB)
        advance(20 * GIB)
    assert len(logs) == 1
    assert "loading weights" in terminal.getvalue()
    assert "42.9/42.9 GB" in terminal.getvalue()
