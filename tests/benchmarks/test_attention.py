"""The attention benchmark's own arithmetic and manners; what it times needs a GPU."""

import pytest
import torch

from base.errors import StartupError
from benchmarks.attention import CaseResult, main, print_results


def test_a_machine_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="CUDA device"):
        main()


def test_the_table_gives_ratio_and_bandwidth(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    results = [CaseResult("attend", 4, (9_000_000, 6_000_000), {"torch": 30.0, "triton": 10.0, "fp8": 5.0})]
    print_results(results, 32768, 4000.0, Console(width=200))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["attend", "4", "30.0", "10.0", "3.00", "900"] in lines
    assert ["attend", "4", "5.0", "1200", "1.5"] in lines
