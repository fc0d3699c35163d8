"""Tests that need CUDA; elsewhere they are skipped with that reason."""

import gc
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def device_memory_is_given_back() -> Iterator[None]:
    """Other workers, and processes that tests start, use the same devices; torch would keep what this test had."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
