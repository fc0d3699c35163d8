"""Commands that are refused."""

from collections.abc import Callable

import pytest

from cli.main import main


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command that is refused, and returns the only line that it says."""

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        assert ended.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        return line

    return run
