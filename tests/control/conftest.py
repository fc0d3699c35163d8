"""Mailboxes without keys and with them."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from control import access
from control.keys import generate
from tests.control.harness import Start, mailboxes


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A key directory."""
    generate(tmp_path / "keys")
    return tmp_path / "keys"


@pytest.fixture
def start() -> Iterator[Start]:
    with mailboxes() as start:
        yield start


@pytest.fixture
def secure(keys: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(access, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr("control.plane._KEYS_S", 0.05)
    with mailboxes(keys) as start:
        yield start
