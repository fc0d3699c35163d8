"""Every kernel compiles without a GPU, and what was compiled is found again."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from base.errors import StartupError
from kernels import launch, score_keys, top_k
from kernels.attend_items import AttendSpecialization
from kernels.copy_items import CopySpecialization
from kernels.launch import KernelCompileError, compile_kernel, cubin
from kernels.score_keys import PageScoreSpecialization, PromptScoreSpecialization
from kernels.specialization import CSRC, Specialization, params_of
from kernels.swap_in import SwapInSpecialization, default_block_size, seen_bits
from kernels.wait_time import WaitTimeSpecialization

H100_SHARED_MEMORY = 232448
ON_HOPPER: list[Specialization] = [
    kind(heads, stages)
    for heads in score_keys.HEADS
    for kind, stages in (
        (PageScoreSpecialization, score_keys.PAGE_STAGES),
        (PromptScoreSpecialization, score_keys.PROMPT_STAGES),
    )
]
ON_HOPPER += [PageScoreSpecialization(heads, score_keys.PAGE_STAGES, queries=4) for heads in score_keys.HEADS]
ON_HOPPER += [AttendSpecialization(item_bytes) for item_bytes in (656, 1152)]
TOP_K = list(top_k.specializations(H100_SHARED_MEMORY))


USUAL = SwapInSpecialization(2048, 4096, 1152, aligned=True, block_size=512, seen_bits=17)


def specialization(**changes: Any) -> SwapInSpecialization:
    return replace(USUAL, **changes)


def every_specialization() -> list[Specialization]:
    """All alignments at a model's sizes, and the ends of the other ranges."""
    found: list[Specialization] = [
        CopySpecialization(b, a) for b, a in [(1152, True), (656, True), (8, False), (1157, False)]
    ]
    found += [specialization(aligned=aligned) for aligned in (True, False)]
    found += [specialization(item_bytes=b, aligned=b % 16 == 0) for b in (8, 16, 656, 1157, 4096, 10000)]
    found += [specialization(block_size=size) for size in (32, 64, 128, 256, 1024)]
    found += [
        specialization(top_k=top_k, hot_size=hot_size, block_size=default_block_size(top_k))
        for top_k, hot_size in [(1, 1), (31, 33), (512, 1024), (2048, 2048), (2048, 32767), (8192, 16384)]
    ]
    found += [
        specialization(queries=queries, window=window, hot_size=hot_size, block_size=default_block_size(2048 * queries))
        for queries, window, hot_size in [(1, 2, 4096), (2, 2, 4096), (3, 4, 4096), (4, 6, 4096), (4, 6, 16384)]
    ]
    return [*found, *TOP_K, WaitTimeSpecialization()]


def compilations() -> Iterator[Any]:
    """Every specialization for every architecture.

    Slow ones: blocks of 32 and 64 threads, which take several seconds to compile, and for others than sm_90 all but
    what a usual model takes.
    """
    usual = (CopySpecialization(1152, True), specialization(), *TOP_K)
    for architecture, kernel in product(("sm_90", "sm_80", "sm_100"), every_specialization()):
        is_slow = kernel.block_size in (32, 64) or (architecture != "sm_90" and kernel not in usual)
        yield pytest.param(
            kernel, architecture, marks=pytest.mark.slow if is_slow else (), id=f"{kernel}-{architecture}"
        )
    for kernel in ON_HOPPER:
        yield pytest.param(kernel, "sm_90a", id=f"{kernel}-sm_90a")


@pytest.mark.parametrize(("kernel", "architecture"), list(compilations()))
def test_every_specialization_compiles(kernel: Specialization, architecture: str) -> None:
    code = compile_kernel(kernel, architecture)
    assert code.startswith(b"\x7fELF")
    assert kernel.entry.encode() in code


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "hisparse-pd" / "kernels"


@pytest.mark.usefixtures("cache")
def test_a_compiled_kernel_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    code = cubin(specialization(), "sm_90")

    monkeypatch.setattr(launch, "compile_kernel", lambda *_: pytest.fail("compiled again"))
    assert cubin(specialization(), "sm_90") == code


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 4096])
def test_a_damaged_file_is_compiled_anew(damage: bytes, cache: Path) -> None:
    code = cubin(CopySpecialization(64, True), "sm_90")
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage + whole[len(damage) : -1])

    assert cubin(CopySpecialization(64, True), "sm_90") == code
    assert file.read_bytes() == whole


def test_what_the_code_depends_on_names_the_file(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = tmp_path / "csrc"
    sources.mkdir()
    for path in CSRC.iterdir():
        (sources / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(launch, "CSRC", sources)
    monkeypatch.setattr(launch, "compile_kernel", lambda *_: b"code")

    def files_after(kernel: Specialization, architecture: str) -> int:
        cubin(kernel, architecture)
        return len(list(cache.iterdir()))

    assert files_after(CopySpecialization(64, True), "sm_90") == 1
    assert files_after(CopySpecialization(64, True), "sm_90") == 1
    assert files_after(CopySpecialization(80, True), "sm_90") == 2
    assert files_after(CopySpecialization(64, True), "sm_100") == 3
    (sources / "common.cuh").write_text((sources / "common.cuh").read_text() + "\n")
    assert files_after(CopySpecialization(64, True), "sm_90") == 4
    monkeypatch.setattr(launch, "_nvrtc_version", lambda: "99.9")
    assert files_after(CopySpecialization(64, True), "sm_90") == 5


def test_what_nvrtc_refuses_is_reported_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "CSRC", tmp_path)
    (tmp_path / "copy_items.cu").write_text("this is no C++")
    with pytest.raises(KernelCompileError, match=r"NVRTC .* cannot compile .* for sm_90"):
        compile_kernel(CopySpecialization(64, True), "sm_90")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"item_bytes": 7}, "at least 8 bytes, found 7"),
        ({"block_size": 100}, "multiple of 32 up to 1024, found 100"),
        ({"block_size": 2048}, "multiple of 32 up to 1024, found 2048"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        specialization(**changes)


def test_arrays_in_shared_memory_do_not_overlap_and_their_sum_is_checked() -> None:
    kernel = specialization(top_k=100, hot_size=300)
    offsets = list(kernel.shared_offsets().values())
    assert offsets == sorted(offsets)
    assert all(offset % 16 == 0 for offset in offsets)

    for kernel in (
        specialization(top_k=2048, hot_size=32767),
        specialization(top_k=8192, hot_size=16384),
        specialization(queries=4, window=6, hot_size=16384),
    ):
        assert kernel.fitted(H100_SHARED_MEMORY) == kernel
    for sizes, named in (
        ({"top_k": 16384, "hot_size": 32767}, "1 x top_k 16384 positions with device_buffer_size 32767"),
        ({"hot_size": 24576, "queries": 4, "window": 6}, "4 x top_k 2048 positions with device_buffer_size 24576"),
    ):
        with pytest.raises(StartupError, match=f"{named} needs .* per block, this device has 232448"):
            specialization(**sizes).fitted(H100_SHARED_MEMORY)


def test_long_contexts_share_bits_where_shared_memory_is_short() -> None:
    million = seen_bits(2**20)
    assert (seen_bits(2**20 + 1), million, seen_bits(2**20 - 1), seen_bits(1)) == (21, 20, 20, 10)
    assert specialization(seen_bits=million).fitted(H100_SHARED_MEMORY).seen_bits == million
    crowded = specialization(hot_size=32767, seen_bits=million).fitted(H100_SHARED_MEMORY)
    assert 17 <= crowded.seen_bits < million
    assert crowded.shared_bytes <= H100_SHARED_MEMORY < replace(crowded, seen_bits=crowded.seen_bits + 1).shared_bytes


@pytest.mark.parametrize("struct", ["struct P {\n    i64 a;\n    i32 b;  // half; as wide\n};", "struct Q {\n};"])
def test_a_parameter_not_8_bytes_wide_is_refused(struct: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.specialization.CSRC", tmp_path)
    (tmp_path / "kernel.cu").write_text(struct)
    with pytest.raises(TypeError, match="expected pointers and i64 as fields of P"):
        params_of("kernel.cu", "P")


@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("width", [100, 1 << 20])
def test_a_device_without_clusters_has_one_block_per_row(rows: int, width: int) -> None:
    assert top_k.choose_geometry(rows, width, *top_k.specializations(shared_memory=101376), {1: 108}).cluster == 1


def test_two_blocks_of_the_kernel_for_many_rows_fit_a_processor() -> None:
    few, many = top_k.specializations(H100_SHARED_MEMORY)
    assert 2 * (many.shared_bytes + 1024) <= 228 * 1024
    assert few.shared_bytes <= H100_SHARED_MEMORY
    assert all(kernel.kept % 32 == kernel.fixed_bytes % 16 == 0 for kernel in (few, many))
