"""`hisparse-pd check` on machines that lack one thing."""

import resource
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from base.errors import StartupError
from cli import check
from cli.main import main
from tests.deploy.program import DEPLOY

NVIDIA = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """One with two GPUs, that has everything. Its files are in the folder."""
    files = {"driver": NVIDIA.format("580.65.06"), "enabled": "always [madvise] never", "shmem_enabled": "[advise]"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "node0").mkdir()
    monkeypatch.setattr(check, "_DRIVER", tmp_path / "driver")
    monkeypatch.setattr(check, "_HUGE_PAGES", tmp_path)
    monkeypatch.setattr(check, "_MEMORY_NODES", tmp_path)
    monkeypatch.setattr(check, "PYTHON_HEADER", Path(__file__))
    monkeypatch.setattr(check, "c_compiler", lambda: "/usr/bin/cc")
    monkeypatch.setattr(check, "_nvrtc_lacks", lambda: None)
    monkeypatch.setattr(check, "rdma_devices", lambda: ["mlx5_0"])
    monkeypatch.setattr(check, "load_mooncake", lambda: None)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=140 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    monkeypatch.setattr(check, "bind_error", lambda host, port: None)
    return tmp_path


def table(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, str]]:
    """The exit code, and the lines that are not ok, by what they are of."""
    with pytest.raises(SystemExit) as ended:
        main(["check"])
    lines = capsys.readouterr().out.splitlines()
    return int(ended.value.code or 0), {line[9:23].strip(): line for line in lines if not line.startswith("ok ")}


def test_a_complete_machine_lacks_nothing(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert table(capsys) == (0, {})


@pytest.mark.usefixtures("machine")
def test_what_is_used_instead_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (check._HUGE_PAGES / "shmem_enabled").write_text("always advise [never]")
    monkeypatch.setattr(check, "rdma_devices", list)
    monkeypatch.setattr(check, "c_compiler", lambda: None)
    monkeypatch.setattr(check, "PYTHON_HEADER", Path("/lacking/Python.h"))
    monkeypatch.setattr(check, "bind_error", lambda host, port: OSError() if port == 8020 else None)
    code, lines = table(capsys)
    assert (code, set(lines)) == (0, {"same, shared", "RDMA", "C compiler", "Python headers", "ports"})
    assert "KV goes over TCP" in lines["RDMA"]
    assert "ordinary pages" in lines["same, shared"]
    assert "torch computes" in lines["Python headers"]
    assert "taken: 8020" in lines["ports"]


def test_an_old_driver_is_missing(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (machine / "driver").write_text(NVIDIA.format("550.54.15"))
    code, lines = table(capsys)
    assert (code, list(lines)) == (1, ["driver"])
    assert "550.54.15; CUDA 13 takes 580 or later" in lines["driver"]
    assert f"LEAST_DRIVER={check.LEAST_DRIVER} " in (DEPLOY / "setup.sh").read_text()


@pytest.mark.usefixtures("machine")
def test_what_no_machine_can_do_without(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def no_mooncake() -> None:
        raise StartupError("cannot load Mooncake (libmlx5.so.1)")

    monkeypatch.setattr(check, "load_mooncake", no_mooncake)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 << 20,) * 2)
    code, lines = table(capsys)
    assert (code, set(lines)) == (1, {"GPUs", "Mooncake", "memlock"})
    assert "libmlx5.so.1" in lines["Mooncake"]
    assert "8.00 MiB; RDMA takes" in lines["memlock"]


def test_a_machine_without_a_gpu_lacks_nothing_required(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "driver").unlink()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(check, "c_compiler", lambda: None)
    table, code = check.report()
    assert code == 0
    assert "none (cc, gcc, clang): only GPUs use it" in table


def test_a_port_that_is_taken_is_not_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert check.bind_error("127.0.0.1", taken.getsockname()[1]) is not None
