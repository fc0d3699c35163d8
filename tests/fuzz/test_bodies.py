"""Whatever a client sends to a gateway is refused or answered, and costs the others nothing."""

from pathlib import Path

import pytest

from tests.fuzz.gateway import run


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("seed", "bodies"), [(1, 500), (1, 20_000), (2, 20_000)])
def test_extreme_bodies_cost_nobody_else(seed: int, bodies: int, tmp_path: Path) -> None:
    done = run(seed, range(bodies), tmp_path)
    assert not done.findings, "\n".join(map(str, done.findings))
    # Where few bodies pass validation, few find anything.
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        assert done.share(path, 200) > 0.25, done.statuses
