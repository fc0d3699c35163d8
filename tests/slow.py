"""Tests that are marked `slow` do not run by default (`addopts` in pyproject.toml); `make test-slow` runs them, whole.

With HISPARSE_PD_SLOW=short, as in .ci/run, one case runs of each test of which `make test` runs none.
"""

import os

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("HISPARSE_PD_SLOW") != "short":
        return
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    kept = []
    for of_test in cases.values():
        fast = [item for item in of_test if item.get_closest_marker("slow") is None]
        kept += fast or of_test[:1]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = kept
