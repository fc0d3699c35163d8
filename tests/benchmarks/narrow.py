"""What is printed at 80 columns, the width of a terminal and of a log."""

import io
from collections.abc import Callable, Iterable

from rich.console import Console

WIDTH = 80


def printed(show: Callable[[Console], None]) -> str:
    """What `show` prints, of which no line is longer and nothing was cut."""
    out = io.StringIO()
    show(Console(width=WIDTH, file=out))
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    assert "..." not in text
    return text


def not_whole(text: str, figures: Iterable[str]) -> list[str]:
    """Which of the figures are no words of the text. Give each cell a figure of its own."""
    words = set(text.split())
    return [figure for figure in figures if figure not in words]
