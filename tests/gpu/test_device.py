"""A device that fails: the process that uses it notices, and says why it ends."""

import subprocess
import sys

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
