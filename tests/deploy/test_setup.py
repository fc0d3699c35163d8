"""deploy/setup.sh on a clean Debian with an NVIDIA GPU that it is told of: the real packages of Debian and Mooncake's.

The driver is a stub (`nvidia-smi`, libcuda.so.1), and so is torch: it loads libcudart of the wheel, as torch does.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.program import REPOSITORY
from tests.skips import impossible

NVIDIA_SMI = """#!/bin/sh
case $1 in
    -L) echo "GPU 0: NVIDIA H200" ;;
    --query-gpu=driver_version) echo "{driver}" ;;
esac
"""
PROJECT = """[project]
name = "hisparse-pd"
version = "0"
dependencies = ["nvidia-cuda-runtime>=13.0"]
[project.optional-dependencies]
cuda13 = ["mooncake-transfer-engine-cuda13>=0.3.13"]
dev = []
[tool.setuptools]
py-modules = ["torch"]
"""
TORCH = """import ctypes, glob, sysconfig
[runtime] = glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/lib/libcudart.so.13")
ctypes.CDLL(runtime, ctypes.RTLD_GLOBAL)
"""
DRIVER_API = """
    cuCtxGetCurrent cuCtxGetDevice cuCtxSetCurrent cuDeviceGet cuDeviceGetAttribute cuDeviceGetPCIBusId
    cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuGetErrorName cuGetErrorString cuInit cuMemAddressFree
    cuMemAddressReserve cuMemCreate cuMemExportToShareableHandle cuMemGetAddressRange_v2 cuMemGetAllocationGranularity
    cuMemGetHandleForAddressRange cuMemImportFromShareableHandle cuMemMap cuMemRelease cuMemRetainAllocationHandle
    cuMemSetAccess cuMemUnmap cuPointerGetAttribute cuPointerSetAttribute
"""
"""What Mooncake 0.3.14 takes of it."""
OF_TESTS = ("ip", "nft", "unshare", "systemd-analyze", "g++", "debootstrap", "promtool")


def run(*command: str | Path, cwd: Path | None = None, path: str | None = None, limit: int = 600) -> tuple[int, str]:
    environment = os.environ | ({"PATH": path} if path else {})
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, stdout=-1, stderr=-2, text=True, timeout=limit, check=False
    )
    return done.returncode, done.stdout


def program(path: Path, text: str = "#!/bin/sh\n") -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def clean_root(tmp_path: Path) -> Path:
    """A clean Debian 12 with Python, and a driver's libcuda."""
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("takes root and debootstrap")
    try:
        socket.create_connection(("deb.debian.org", 80), 10).close()
    except OSError:
        pytest.skip(impossible("Debian's packages cannot be reached"))
    root = tmp_path / "root"
    done = run("debootstrap", "--variant=minbase", "--include=ca-certificates,python3,python3-venv", "bookworm", root)
    assert done[0] == 0, done[1]
    for file in ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"):
        shutil.copy(file, root / file[1:])
    stub = root / "usr/lib/x86_64-linux-gnu/libcuda.so.1"
    source = tmp_path / "cuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in DRIVER_API.split()))
    assert run("cc", "-shared", "-fPIC", source, "-Wl,-soname,libcuda.so.1", "-o", stub) == (0, "")
    return root


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_clean_gpu_host_gets_all_that_loads_mooncake(clean_root: Path) -> None:
    for name in OF_TESTS:
        program(clean_root / "usr/local/bin" / name)
    program(clean_root / "usr/local/bin/nvidia-smi", NVIDIA_SMI.format(driver="580.65.06"))
    checkout = clean_root / "checkout"
    (checkout / "deploy").mkdir(parents=True)
    shutil.copy(REPOSITORY / "deploy/setup.sh", checkout / "deploy")
    (checkout / "pyproject.toml").write_text(PROJECT)
    (checkout / "torch.py").write_text(TORCH)
    inside = ("chroot", clean_root, "env", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PIP_FIND_LINKS=")
    code, output = run(*inside, "sh", "-c", "cd /checkout && sh deploy/setup.sh")
    assert (code, output.splitlines()[-1]) == (0, ">> ready: .venv"), output
    # What Triton does at the first launch.
    compiled = run(*inside, "sh", "-c", "echo '#include <Python.h>' | cc -I/usr/include/python3.11 -c -x c - -o /a.o")
    assert compiled == (0, "")


def test_the_set_up_refuses_a_driver_older_than_cuda_13(tmp_path: Path) -> None:
    program(tmp_path / "nvidia-smi", NVIDIA_SMI.format(driver="550.54.15"))
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    code, output = run("sh", REPOSITORY / "deploy/setup.sh", cwd=tmp_path, path=path)
    assert code == 2
    assert "driver 580 or later is needed, 550.54.15 found" in output
