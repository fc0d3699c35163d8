"""The top-k benchmark's own arithmetic and manners; what it times needs a GPU."""

import pytest
import torch
from rich.console import Console

from base.errors import StartupError
from benchmarks.top_k import CaseResult, _imported, main, print_results


def test_a_machine_without_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="CUDA device"):
        main()


@pytest.mark.parametrize("name", ["torch", "torch:no_such_function", "no_such_module:top"])
def test_something_beside_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(StartupError, match=f"--beside {name}: expected module:function"):
        _imported(name)


def test_the_table_gives_ratios_and_what_was_swept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    results = [
        CaseResult(16, 64 << 10, 2.0, {"torch": 60.0, "ours": 10.0}, {"1024x4": 11.5, "512x2": 12.0}),
        CaseResult(1, 8 << 10, 0.1, {"torch": 30.0, "ours": 5.0}, {}),
    ]
    print_results(results, Console(width=200))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["16", "x", "64K", "2.0", "60.0", "10.0", "6.0", "20%"]
    assert lines[2].split() == ["1", "x", "8K", "0.1", "30.0", "5.0", "6.0", "2%"]
    assert lines[3] == "16 x 64K, threads x blocks per row: 1024x4 11.5, 512x2 12.0"
