"""What all tests, and the processes that they start, have in their environment.

One thread per process: several processes share few cores, and threads that wait for each other starve them.
A directory without certificates instead of the system's: httpx reads those for every client that it makes, for 30 ms
of a processor, and tests that wait for something ask some thousand times. Who speaks TLS here says whom it trusts.
"""

import gc
import os
import signal
from pathlib import Path

import hypothesis
import pytest
import structlog

import base.logs
from tests.skips import pytest_runtest_makereport
from tests.slow import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_makereport"]

pytest.register_assert_rewrite("tests.e2e.asking", "tests.e2e.chaos_clients")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# How long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# A shell starts its background jobs with Ctrl-C ignored, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(Path(__file__).parent)
# By default a traceback is drawn with all local variables, which takes a tenth of a second.
_plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _plain])
# A node that a test starts in this process leaves the logs alone: loggers keep the first processors that they use, and
# `capture_logs` sees nothing of them after the next node has configured others.
base.logs.configure_logging = lambda *_: None


def pytest_collection_finish() -> None:
    """What was imported is not looked through again: a full collection of garbage passes over a million objects."""
    gc.collect()
    gc.freeze()
