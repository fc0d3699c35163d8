"""Where all tests are to run, one that is skipped has failed.

`.ci/run` says so with HISPARSE_PD_SKIPS=fail. Then only these may be skipped: what needs a GPU, and what this machine
cannot do whatever is installed, which the test has to put into words (`impossible`).
"""

import os
from collections.abc import Generator

import pytest

_IMPOSSIBLE = "impossible on this machine: "


def impossible(reason: str) -> str:
    """A reason to skip that counts everywhere: not for want of what `make setup` installs (no browser), nor of root."""
    return _IMPOSSIBLE + reason


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if os.environ.get("HISPARSE_PD_SKIPS") == "fail" and report.skipped and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not item.nodeid.startswith("tests/gpu/") and _IMPOSSIBLE not in reason:
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} must not be skipped here (HISPARSE_PD_SKIPS=fail). {reason}"
    return report
