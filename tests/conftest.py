"""One thread per process: several processes share few cores, and threads that wait for each other starve them."""

import os

from tests.skips import pytest_runtest_makereport
from tests.slow import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_makereport"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
