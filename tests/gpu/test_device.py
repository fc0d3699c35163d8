"""A device that fails: the process that uses it notices, and says why it ends. And the order of work on two streams."""

import subprocess
import sys

import pytest
import torch

from base.device import SideStream

FAIL = """
import torch
from base.device import DeviceFailed, check_device
device = torch.device("cuda", 0)
check_device(device)
try:
    torch.empty(1 << 50, device=device)
except torch.OutOfMemoryError:
    check_device(device)
    print("memory that is not there costs only what asked for it")
table = torch.zeros(4, device=device)
try:
    table[torch.full((1,), 1 << 40, device=device)].sum().item()
except Exception as error:
    print("met:", type(error).__name__)
try:
    check_device(device)
except DeviceFailed as failure:
    print("failed:", failure)
"""


def test_an_illegal_access_is_told_from_a_lack_of_memory() -> None:
    done = subprocess.run([sys.executable, "-c", FAIL], capture_output=True, text=True, timeout=120)
    assert "memory that is not there costs only what asked for it" in done.stdout, done.stderr
    assert "failed: cuda:0 cannot be used any more: " in done.stdout


@pytest.mark.parametrize("record", [False, True], ids=["eager", "recorded"])
def test_a_fork_comes_after_what_was_queued_and_before_what_follows_its_join(record: bool) -> None:
    side = SideStream(torch.device("cuda", torch.cuda.current_device()))
    before, beside, after = torch.zeros(3, 1, device="cuda")

    def work() -> None:
        torch.cuda._sleep(10**7)  # type: ignore[no-untyped-call]
        before.fill_(2)
        with side.fork():
            torch.cuda._sleep(10**7)  # type: ignore[no-untyped-call]
            torch.mul(before, 3, out=beside)
        side.join()
        torch.add(beside, 1, out=after)

    work()
    if record:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        for tensor in (before, beside, after):
            tensor.zero_()
        graph.replay()
    assert (before.item(), beside.item(), after.item()) == (2, 6, 7)
