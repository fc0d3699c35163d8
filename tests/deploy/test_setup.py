"""deploy/setup.sh on clean Debian roots, without a GPU and with one that it is told of.

Debian's packages and Mooncake's are real. The driver is a stub (`nvidia-smi`, libcuda.so.1), and so is torch, which
loads libcudart of the wheel as torch does.
"""

import os
import shutil
import socket
import subprocess
import sys
import zipfile
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
dependencies = ["torch==2.13.0+cpu"]
[project.optional-dependencies]
cpu = ["mooncake-transfer-engine-non-cuda>=0.3.13"]
cuda13 = ["mooncake-transfer-engine-cuda13>=0.3.13", "nvidia-cuda-runtime>=13.0"]
dev = []
[tool.setuptools]
py-modules = []
"""
TORCH = {
    "torch.py": """import ctypes, glob, sysconfig
for runtime in glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/lib/libcudart.so.13"):
    ctypes.CDLL(runtime, ctypes.RTLD_GLOBAL)
""",
    "torch-2.13.0+cpu.dist-info/METADATA": "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0+cpu\n",
    "torch-2.13.0+cpu.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "torch-2.13.0+cpu.dist-info/RECORD": "",
}
DRIVER_API = """
    cuCtxGetCurrent cuCtxGetDevice cuCtxSetCurrent cuDeviceGet cuDeviceGetAttribute cuDeviceGetPCIBusId
    cuDevicePrimaryCtxRelease_v2 cuDevicePrimaryCtxRetain cuGetErrorName cuGetErrorString cuInit cuMemAddressFree
    cuMemAddressReserve cuMemCreate cuMemExportToShareableHandle cuMemGetAddressRange_v2 cuMemGetAllocationGranularity
    cuMemGetHandleForAddressRange cuMemImportFromShareableHandle cuMemMap cuMemRelease cuMemRetainAllocationHandle
    cuMemSetAccess cuMemUnmap cuPointerGetAttribute cuPointerSetAttribute
"""
"""What Mooncake 0.3.14 takes of it."""
OF_TESTS = ("ip", "nft", "unshare", "systemd-analyze", "g++", "debootstrap", "promtool")


def run(*command: str | Path, cwd: Path | None = None, path: str | None = None, limit: int = 1800) -> tuple[int, str]:
    environment = os.environ | ({"PATH": path} if path else {})
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, stdout=-1, stderr=-2, text=True, timeout=limit, check=False
    )
    return done.returncode, done.stdout


def program(path: Path, text: str = "#!/bin/sh\n") -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture(scope="module", params=["bookworm", "trixie"])
def debian(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean Debian 12 or 13 with sudo and without Python, a user who may use sudo, and a checkout of the set-up."""
    if os.geteuid() or not shutil.which("debootstrap"):
        pytest.skip("takes root and debootstrap")
    try:
        socket.create_connection(("deb.debian.org", 80), 10).close()
    except OSError:
        pytest.skip(impossible("Debian's packages cannot be reached"))
    root: Path = tmp_path_factory.mktemp("debian") / request.param
    done = run("debootstrap", "--variant=minbase", "--include=ca-certificates,sudo", request.param, root)
    assert done[0] == 0, done[1]
    for file in ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"):
        shutil.copy(file, root / file[1:])
    # sudo looks its host up.
    (root / "etc/hosts").write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
    assert run("chroot", root, "useradd", "--create-home", "user") == (0, "")
    (root / "etc/sudoers.d/user").write_text("user ALL=(ALL) NOPASSWD: ALL\n")
    checkout = root / "home/user/checkout"
    (checkout / "deploy").mkdir(parents=True)
    shutil.copy(REPOSITORY / "deploy/setup.sh", checkout / "deploy")
    (checkout / "pyproject.toml").write_text(PROJECT)
    with zipfile.ZipFile(checkout / "torch-2.13.0+cpu-py3-none-any.whl", "w") as wheel:
        for name, text in TORCH.items():
            wheel.writestr(name, text)
    for name in OF_TESTS:
        program(root / "usr/local/bin" / name)
    return root


def give_a_gpu(root: Path) -> None:
    program(root / "usr/local/bin/nvidia-smi", NVIDIA_SMI.format(driver="580.65.06"))
    source = root / "cuda.c"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in DRIVER_API.split()))
    library = root / "usr/lib/x86_64-linux-gnu/libcuda.so.1"
    assert run("cc", "-shared", "-fPIC", source, "-Wl,-soname,libcuda.so.1", "-o", library) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("user", ["root", "user"])
def test_a_clean_debian_gets_all_that_loads_mooncake(debian: Path, user: str, device: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert run("cp", "-a", debian, root) == (0, "")
    if device == "gpu":
        give_a_gpu(root)
    assert run("chroot", root, "chown", "-R", f"{user}:", "/home/user/checkout") == (0, "")
    environment = ("HOME=/home/user", "PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "PIP_FIND_LINKS=.")
    inside = ("chroot", f"--userspec={user}", root, "env", *environment)
    code, output = run(*inside, "sh", "-c", "cd ~/checkout && sh deploy/setup.sh")
    assert (code, output.splitlines()[-1]) == (0, ">> ready: .venv"), output
    if device == "gpu":
        # What Triton does at the first launch.
        compile_ = "echo '#include <Python.h>' | cc -I$(echo /usr/include/python3.1*) -c -x c - -o ~/a.o"
        assert run(*inside, "sh", "-c", compile_) == (0, "")
    shutil.rmtree(root)


def test_a_user_without_sudo_is_told_what_root_has_to_install(tmp_path: Path) -> None:
    program(tmp_path / "id", "#!/bin/sh\necho 1000\n")
    program(tmp_path / "ldconfig")
    for name in ("sh", "grep", "env"):
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    (tmp_path / "python3").symlink_to(sys.executable)
    code, output = run("sh", REPOSITORY / "deploy/setup.sh", cwd=tmp_path, path=str(tmp_path))
    assert code == 2
    assert "as root, run: apt-get install libibverbs1 ibverbs-providers libnuma1 libcurl4" in output


def test_the_set_up_refuses_a_driver_older_than_cuda_13(tmp_path: Path) -> None:
    program(tmp_path / "nvidia-smi", NVIDIA_SMI.format(driver="550.54.15"))
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    code, output = run("sh", REPOSITORY / "deploy/setup.sh", cwd=tmp_path, path=path)
    assert code == 2
    assert "driver 580 or later is needed, 550.54.15 found" in output
