"""What a process may plan with: the machine's memory, a container's, and the processors near its device."""

from pathlib import Path

import psutil
import pytest

from service import memory
from service.memory import available_host_bytes, parse_cpu_list


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group /pods/one, in files of ours."""
    own = tmp_path / "own"
    own.write_text("12:memory:/elsewhere\n0::/pods/one\n")
    root = tmp_path / "cgroup"
    (root / "pods" / "one").mkdir(parents=True)
    monkeypatch.setattr(memory, "_CGROUP", own)
    monkeypatch.setattr(memory, "_CGROUPS", root)
    return root


def limit(group: Path, most: str, used: int, cached: int) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")


def test_a_containers_limit_counts_as_the_end_of_memory(cgroups: Path) -> None:
    limit(cgroups / "pods" / "one", "10000", used=7000, cached=500)
    assert available_host_bytes() == 3500


def test_the_tightest_group_above_counts(cgroups: Path) -> None:
    limit(cgroups / "pods" / "one", "10000", used=1000, cached=0)
    limit(cgroups / "pods", "12000", used=11000, cached=300)
    assert available_host_bytes() == 1300


def test_without_a_limit_it_is_what_the_machine_has(cgroups: Path) -> None:
    limit(cgroups / "pods" / "one", "max", used=1000, cached=0)
    assert available_host_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.2)


def test_a_group_that_is_over_its_limit_leaves_nothing(cgroups: Path) -> None:
    limit(cgroups / "pods" / "one", "10000", used=12000, cached=0)
    assert available_host_bytes() == 0


@pytest.mark.parametrize(("text", "cpus"), [("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5", {5}), ("\n", set())])
def test_processors_are_read_as_the_kernel_lists_them(text: str, cpus: set[int]) -> None:
    assert parse_cpu_list(text) == cpus
