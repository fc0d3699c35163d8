"""Tests that need CUDA; elsewhere they are skipped with that reason."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "tests/gpu/" in item.nodeid:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
