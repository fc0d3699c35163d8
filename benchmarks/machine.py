"""What a measurement ran on: figures without it mean nothing."""

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = (
    "hisparse-pd",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "nixl",
    "numpy",
    "torch",
    "triton",
)


@dataclass(frozen=True)
class Machine:
    """cores: those that this process may use. memory: bytes of the whole machine. packages: installed versions."""

    cpu: str
    cores: int
    memory: int
    kernel: str
    python: str
    packages: dict[str, str]

    def __str__(self) -> str:
        mooncake = next((f", Mooncake {v}" for name, v in self.packages.items() if name.startswith("mooncake")), "")
        return (
            f"{self.cpu}, {self.cores} cores, {self.memory / 2**30:.0f} GiB, Linux {self.kernel}, "
            f"Python {self.python}{mooncake}"
        )


def this_machine() -> Machine:
    """The machine and the environment of this process."""
    return Machine(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        packages=_installed(),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _installed() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
