"""Which device a process runs on, and that it sees no other."""

import os

import pytest
import torch

from base.errors import StartupError
from service.node_model import use_device


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which torch finds as many devices as CUDA_VISIBLE_DEVICES leaves of four."""

    def visible() -> int:
        return len((os.environ.get("CUDA_VISIBLE_DEVICES") or "0,1,2,3").split(","))

    # Set and removed, so that it is as it was after the test, whatever the test's subject writes to it.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.cuda, "device_count", visible)
    return monkeypatch


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("flag", "seen"), [("cuda", "0"), ("cuda:0", "0"), ("cuda:3", "3")])
def test_a_process_sees_its_own_gpu_only(flag: str, seen: str) -> None:
    assert use_device(flag) == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


def test_numbers_count_what_the_process_was_given(four_gpus: pytest.MonkeyPatch) -> None:
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-5f1a")
    assert use_device("cuda:1") == torch.device("cuda", 0)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-5f1a"


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize("flag", ["cuda:4", "cuda:-1", "cuda:one", "cpu:0", "mps", ""])
def test_a_device_that_is_not_there_stops_the_start(flag: str) -> None:
    with pytest.raises(StartupError, match=f"--device {flag}: "):
        use_device(flag)


def test_on_a_cpu_nothing_is_hidden(four_gpus: pytest.MonkeyPatch) -> None:
    four_gpus.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert use_device("cpu") == torch.device("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
