"""What a process may plan with: in a container not all of the machine's memory; and the processors near its device."""

import re
from pathlib import Path

import pytest
import torch

from base import memory
from base.memory import available_host_bytes, cgroup_available, device_split, parse_cpu_list

MIB = 2**20


def group(directory: Path, limit: int | str, used: int = 0, inactive_file: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon {used - inactive_file}\ninactive_file {inactive_file}\n")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "self"
    path.write_text("1:name=systemd:/\n0::/pods/decode\n")
    return path


def test_a_containers_limit_counts_less_what_is_used_and_cannot_be_dropped(tmp_path: Path, own: Path) -> None:
    group(tmp_path / "pods/decode", limit=1024 * MIB, used=300 * MIB, inactive_file=100 * MIB)
    assert list(cgroup_available(tmp_path, own)) == [824 * MIB]


def test_limits_of_groups_further_up_count_too(tmp_path: Path, own: Path) -> None:
    group(tmp_path / "pods/decode", limit="max", used=300 * MIB)
    group(tmp_path / "pods", limit=512 * MIB, used=400 * MIB)
    assert list(cgroup_available(tmp_path, own)) == [112 * MIB]


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path) -> None:
    own = tmp_path / "self"
    own.write_text("0::/\n")
    group(tmp_path, limit=256 * MIB, used=512 * MIB)
    assert list(cgroup_available(tmp_path, own)) == [0]


@pytest.mark.parametrize("text", ["", "4:memory:/version-1\n", "0::/gone\n"])
def test_where_nothing_is_limited_nothing_is_said(tmp_path: Path, text: str) -> None:
    own = tmp_path / "self"
    own.write_text(text)
    assert list(cgroup_available(tmp_path, own)) == []
    assert list(cgroup_available(tmp_path, tmp_path / "none")) == []


def test_the_least_limit_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "cgroup_available", lambda: iter([7 * MIB, 5 * MIB]))
    assert available_host_bytes() == 5 * MIB


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("\n", set())])
def test_processors_are_read_as_the_kernel_lists_them(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus


def test_the_split_of_device_memory_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 << 30, 80 << 30))
    split = device_split(torch.device("cuda", 0), 0.75)
    assert split is not None
    assert [float(part) for part in re.findall(r"([\d.]+) GiB", split)] == [80, 20, 45, 15]
    assert device_split(torch.device("cpu"), 0.75) is None
