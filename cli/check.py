"""`hisparse-pd check`: what this machine has for the service, what it lacks, and what is used instead."""

import importlib
import re
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch

from base.errors import StartupError
from base.memory import available_host_bytes, human
from cli.serve import LOOPBACK, bind_error
from decode_node.config import DecodeConfig
from gateway.config import GatewayConfig
from kernels.ops import PYTHON_HEADER, c_compiler
from prefill_node.config import PrefillConfig
from transfer.engine import load_mooncake, rdma_devices

LEAST_DRIVER = 580
"""Of CUDA 13, which torch and Mooncake are built for. deploy/setup.sh names the same."""
_DRIVER = Path("/proc/driver/nvidia/version")
_MEMORY_NODES = Path("/sys/devices/system/node")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


class Verdict(Enum):
    """Whether the machine has something, makes do without it, or lacks what the service cannot do without."""

    HAS = "ok"
    LACKS = "-"
    MISSING = "MISSING"


@dataclass(frozen=True)
class Finding:
    """A line of the table."""

    verdict: Verdict
    what: str
    found: str


def report() -> tuple[str, int]:
    """The table, and the exit code: 1 if something is missing that is required."""
    found = list(findings())
    lines = [f"{each.verdict.value:7}  {each.what:14}  {each.found}" for each in found]
    return "\n".join(lines), int(any(each.verdict is Verdict.MISSING for each in found))


def findings() -> Iterator[Finding]:
    driver = _read(_DRIVER)
    yield _driver(driver)
    yield _gpus(driver is not None)
    yield _mooncake()
    instead = "torch computes, more slowly" if driver else "only GPUs use it"
    yield _optional("kernels", _nvrtc_lacks(), "NVRTC", instead)
    compiler = c_compiler()
    yield _optional("C compiler", None if compiler else "none (cc, gcc, clang)", compiler or "", instead)
    lacks = None if PYTHON_HEADER.exists() else f"no {PYTHON_HEADER} (python3-dev)"
    yield _optional("Python headers", lacks, str(PYTHON_HEADER.parent), instead)
    devices = rdma_devices()
    yield _optional("RDMA", None if devices else "no device", ", ".join(devices), "KV goes over TCP, or shared memory")
    yield _locked_memory(bool(devices))
    for what, file in (("huge pages", "enabled"), ("same, shared", "shmem_enabled")):
        mode = _chosen(_read(_HUGE_PAGES / file))
        lacks = f"{file} is {mode}" if mode in ("never", "deny", "unknown") else None
        yield _optional(what, lacks, f"{file} is {mode}", "ordinary pages, read more slowly")
    nodes = len(list(_MEMORY_NODES.glob("node[0-9]*")))
    yield Finding(Verdict.HAS, "NUMA", f"{nodes or 1} node{'s' if nodes > 1 else ''}")
    yield Finding(Verdict.HAS, "host memory", f"{human(available_host_bytes())} available")
    yield _ports()


def _driver(text: str | None) -> Finding:
    if text is None:
        return Finding(Verdict.LACKS, "driver", "no NVIDIA driver: --device cpu only")
    version = re.search(r"\b(\d{3,})\.[\d.]+", text)
    if version is None or int(version[1]) < LEAST_DRIVER:
        found = "of unknown version" if version is None else version[0]
        return Finding(Verdict.MISSING, "driver", f"NVIDIA driver {found}; CUDA 13 takes {LEAST_DRIVER} or later")
    return Finding(Verdict.HAS, "driver", f"NVIDIA {version[0]}")


def _gpus(has_driver: bool) -> Finding:
    """GPUs that torch can use, which a machine with a driver should have."""
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    if gpus:
        return Finding(Verdict.HAS, "GPUs", f"{len(gpus)} x {gpus[0].name}, {human(gpus[0].total_memory)}")
    if not has_driver:
        return Finding(Verdict.LACKS, "GPUs", "none: models are computed on the CPU")
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is a build for CPUs: install hisparse-pd[cuda13] in a new environment"
        return Finding(Verdict.MISSING, "GPUs", why)
    return Finding(Verdict.MISSING, "GPUs", "torch finds none; does `nvidia-smi -L`? is CUDA_VISIBLE_DEVICES empty?")


def _mooncake() -> Finding:
    try:
        load_mooncake()
    except StartupError as error:
        return Finding(Verdict.MISSING, "Mooncake", str(error))
    return Finding(Verdict.HAS, "Mooncake", "loads")


def _nvrtc_lacks() -> str | None:
    try:
        importlib.import_module("kernels.launch")
    except ImportError as error:
        return f"no {error.name} (hisparse-pd[kernels])"
    return None


def _locked_memory(has_rdma: bool) -> Finding:
    """An RDMA device registers pools, which counts against this limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(Verdict.HAS, "memlock", "unlimited")
    if has_rdma:
        why = f"{human(soft)}; RDMA takes `ulimit -l unlimited`, or give --transfer-protocol other than rdma and auto"
        return Finding(Verdict.MISSING, "memlock", why)
    return Finding(Verdict.HAS, "memlock", f"{human(soft)}, which is enough without RDMA")


def _ports() -> Finding:
    """The default ports of the three kinds of process, on loopback."""
    ports = [port for kind in (GatewayConfig, PrefillConfig, DecodeConfig) for port in (kind.port, kind.control_port)]
    if taken := [str(port) for port in ports if bind_error(LOOPBACK, port)]:
        return Finding(Verdict.LACKS, "ports", f"taken: {', '.join(taken)}; give --port and --control-port")
    return Finding(Verdict.HAS, "ports", f"{', '.join(map(str, ports))} are free")


def _optional(what: str, lacks: str | None, has: str, instead: str) -> Finding:
    return Finding(Verdict.HAS, what, has) if lacks is None else Finding(Verdict.LACKS, what, f"{lacks}: {instead}")


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _chosen(text: str | None) -> str:
    """The word in brackets, as in "always [madvise] never"."""
    found = re.search(r"\[(\w+)\]", text or "")
    return found[1] if found else "unknown"
