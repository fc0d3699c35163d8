"""Whatever a process with a valid key sends to a node's control port, the node lives and others have their tokens."""

from pathlib import Path

import pytest

from tests.fuzz.node import run


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("seed", "messages"), [(1, 500), (1, 20_000), (2, 20_000)])
def test_extreme_messages_cost_nobody_else(seed: int, messages: int, tmp_path: Path) -> None:
    findings, counts = run("decode", seed, range(messages), tmp_path)
    assert not findings, "\n".join(map(str, findings))
    # Where no request is taken to its end, few find anything.
    assert counts["length"], counts
