"""Figures of a run as JSON, with the machine that they are of, and whether files can be written."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from base.errors import StartupError
from benchmarks.machine import this_machine


def check_writable(*paths: Path) -> None:
    """Raises StartupError for a file that cannot be written: to be known before hours of measuring."""
    for path in paths:
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise StartupError(f"{path} cannot be written: expected a file in a folder that is there and writable")


def write_document(path: Path, content: Mapping[str, Any], indent: int | None = 1) -> None:
    """The content as JSON. A `machine` that is not in it is this one."""
    path.write_text(json.dumps({"machine": asdict(this_machine()), **content}, indent=indent) + "\n")
