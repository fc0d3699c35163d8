"""Tests that are marked `slow` do not run by default (`addopts` in pyproject.toml); `make test-slow` runs them, whole.

With HISPARSE_PD_SLOW=short, as in .ci/run, of each parametrised one only the first case that is marked runs.
"""

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("HISPARSE_PD_SLOW") != "short":
        return
    tests: set[str] = set()
    kept, left_out = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        is_slow = item.get_closest_marker("slow") is not None
        (left_out if is_slow and test in tests else kept).append(item)
        if is_slow:
            tests.add(test)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
