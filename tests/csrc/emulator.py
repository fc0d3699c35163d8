"""Kernels of csrc/, built by the C++ compiler of this machine and run on the CPU by `emulator.h`."""

import ctypes
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from kernels.specialization import CSRC, Specialization

COMPILER = shutil.which("g++")
_HERE = Path(__file__).parent
_IN_PTX = {  # by how the statement begins
    r'asm volatile\("" :.*?\);': "",
    r'asm volatile\("prefetch\..*?\);': "",
    r'asm volatile\("mov\.u64.*?globaltimer.*?\);': "now = emulated_ns();",
    r'asm volatile\("griddepcontrol\..*?\);': "",
    r'asm volatile\("setmaxnreg\..*?\);': "",
    r'asm volatile\("mbarrier[^"]*" ::"r"\(shared_address\(gate_\)\), "r"\(threads.*?\);': "make_gate(gate_, threads);",
    r'asm volatile\("mbarrier\.arrive\.expect_tx[^"]*" ::"r"\(shared_address\(gate_.*?\);': "",
    r'asm volatile\("mbarrier\.arrive[^"]*" ::"r"\(shared_address\(gate_.*?\);': "arrive_at_gate(gate_);",
    r'asm volatile\("cp\.async\.mbarrier.*?\);': "arrive_at_gate(gate_);",
    r'asm volatile\(\s*"\{\\n"\s*"\.reg \.pred open.*?\);': "if (!(open = is_open(gate_, phase))) yield();",
    r'asm volatile\(\s+"wgmma\..*?\);': "multiply_emulated(sums, left, right);",
    r'asm\("ex2\..*?\);': "power = std::exp2(exponent);",
    r'asm\("lg2\..*?\);': "logarithm = std::log2(x);",
    r'asm\("cvt\.rn\.bf16x2.*?\);': "both = bfloat16_of(second) << 16 | bfloat16_of(first);",
    r'asm\("\{\\n"\s*"\.reg \.f32 f.*?\);': "factors = emulated_factors(__uint_as_float(scale));",
    r'asm\("\{\\n"\s*"\.reg \.b32 a.*?\);': "emulated_scaled(numbers, factors, first, second);",
    r'asm volatile\("wgmma\..*?\);': "",
    r'asm volatile\("fence\..*?\);': "",
    r'asm volatile\("cp\.async\.(commit|wait)_group.*?\);': "",
    r'asm volatile\(\s*"\{\\n"\s*"\.reg \.pred adds.*?\);': "multiply_emulated(sums, left, right, step);",
    r'asm volatile\("cp\.async\.bulk.*?\);': "std::memcpy(to, from, bytes), arrive_at_gate(gate_);",
    r'asm volatile\("ld\.global\..*?\);': "v = *reinterpret_cast<const uint4*>(from);",
    r'asm volatile\("cp\.async\.ca\..*?\);': "std::memcpy(to, from, BYTES);",
    r'asm volatile\("cp\.async\.cg\..*?\);': "std::memcpy(to, from, 16);",
    r'asm volatile\("cp\.async\.wait_all.*?\);': "",
    r'asm volatile\(\s*"mbarrier\.init.*?\);': "*arrived_ = 0;",
    r'asm volatile\("mbarrier\.arrive.*?\);': "*arrived_ += 8 * words;",
    r'asm volatile\(\s*"\{\\n"\s*"\.reg \.b32 to.*?\);': "send_async(words_ + at, arrived_, peer, value);",
    r'asm volatile\(\s*"\{\\n"\s*"\.reg \.pred done.*?\);': "if (!(done = *arrived_ == 0)) yield();",
}
_PARAMS = {
    "swap_in": "SwapInParams",
    "copy_items": "CopyItemsParams",
    "wait_time": "WaitTimeParams",
    "top_k": "TopKParams",
    "score_pages": "ScorePagesParams",
    "score_prompt": "ScorePromptParams",
    "attend_items": "AttendItemsParams",
}
_SHARED_MEMORY = "extern __shared__ __align__(16) u8 memory[];"


class EmulatedKernel:
    """Looks like kernels.launch.DeviceKernel; memory is that of this process."""

    def __init__(self, specialization: Specialization) -> None:
        self.specialization = specialization
        self._run = ctypes.CDLL(str(_build(specialization))).run_kernel
        self._run.argtypes = [ctypes.c_void_p, *[ctypes.c_int] * 6]

    def launch(
        self,
        params: ctypes.Structure,
        grid: tuple[int, int, int],
        cluster: int = 1,
        shared_bytes: int | None = None,
    ) -> None:
        """Run to the end. Raises RuntimeError for what would hang on a GPU (details on stderr)."""
        shape = self.specialization
        shared_bytes = shape.shared_bytes if shared_bytes is None else shared_bytes
        if self._run(ctypes.addressof(params), *grid, cluster, shape.block_size, shared_bytes):
            raise RuntimeError(f"{shape.entry} does not come to its end")


def _build(specialization: Specialization) -> Path:
    """A shared library with `run_kernel`, in a directory for such."""
    assert COMPILER is not None
    params = _PARAMS[specialization.entry]
    source = _flatten(CSRC / specialization.source, set())
    for statement, in_cpp in _IN_PTX.items():
        source = re.sub(statement, in_cpp, source, flags=re.DOTALL)
    source = source.replace(_SHARED_MEMORY, "u8* const memory = current->shared->memory.data();")
    source += f"""
extern "C" int run_kernel(const void* params, int x, int y, int z, int cluster, int threads, int shared_bytes) {{
    const dim3 grid = {{static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z)}};
    const auto* const given = static_cast<const {params}*>(params);
    return run<{params}, {specialization.entry}>(given, grid, cluster, threads, shared_bytes);
}}
"""
    source = f'#include "{_HERE / "emulator.h"}"\n{source}'
    defines = [f"-D{name}={value}" for name, value in specialization.defines().items()]
    key = hashlib.sha256("\n".join([source, *defines, (_HERE / "emulator.h").read_text()]).encode()).hexdigest()[:24]
    directory = Path(tempfile.gettempdir()) / "hisparse-pd-emulator"
    directory.mkdir(exist_ok=True)
    library = directory / f"{key}.so"
    if not library.exists():
        building = Path(tempfile.mkdtemp(dir=directory))
        (building / "kernel.cpp").write_text(source)
        subprocess.run(
            [COMPILER, "-std=c++17", "-O1", "-g", "-w", "-shared", "-fPIC", *defines, "-o", "kernel.so", "kernel.cpp"],
            cwd=building,
            check=True,
        )
        (building / "kernel.so").rename(library)
        shutil.rmtree(building)
    return library


def _flatten(path: Path, seen: set[Path]) -> str:
    """A source with its includes in place, each once."""
    if path in seen:
        return ""
    seen.add(path)
    lines = []
    for line in path.read_text().splitlines():
        include = re.fullmatch(r'#include "(\w+\.cuh)"', line)
        lines.append(_flatten(path.parent / include[1], seen) if include else line)
    return "\n".join(line for line in lines if line != "#pragma once")
