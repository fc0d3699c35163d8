"""The positions of the largest scores of each row, with csrc/top_k.cu: radix select (11 + 11 + 10 bits)."""

import ctypes
import functools
from dataclasses import dataclass, field, replace

import torch

from kernels.launch import DeviceKernel, shared_memory_limit
from kernels.specialization import MAX_BLOCK_SIZE, PORTABLE_CLUSTER, Specialization, params_of

MAX_WIDTH = 2**30
_LEAST_PART = 4096
"""Scores of a row that are worth a block of their own: exchanging counts takes longer than counting fewer."""
_MANY_ROWS_PART = 16384
"""Scores of a block where rows are many: several such blocks fit a processor, so that one reads while others wait."""
_LENGTH_TYPES = (torch.int64, torch.int32)
KEPT_STEP = 1024
"""What a block keeps is a multiple of this, so that there are few different launches."""
TopKParams = params_of("top_k.cu", "TopKParams")


@dataclass(frozen=True)
class TopKSpecialization(Specialization):
    """csrc/top_k.cu. kept: the most keys that a launch may keep in the shared memory of a block. max_cluster: the most
    blocks of a row, a power of two. blocks_per_processor: how many of them a processor must have registers for.
    """

    kept: int
    block_size: int
    max_cluster: int = field()
    blocks_per_processor: int

    entry = "top_k"

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the keys: `Counters` of csrc/radix.cuh, and a counter for each warp."""
        bins, groups_and_bins_of_a_group, arrived, threshold, totals = 2048, 64 + 32, 4, 8, 32
        return 4 * (bins + self.max_cluster * groups_and_bins_of_a_group + arrived + threshold + totals)

    @property
    def shared_bytes(self) -> int:
        return self.shared_bytes_for(self.kept)

    def fitted(self, available: int) -> "TopKSpecialization":
        """This, keeping as many keys as `available` bytes of shared memory per block have room for."""
        return replace(self, kept=(available - self.fixed_bytes) // 4 // KEPT_STEP * KEPT_STEP)

    def kept_of(self, width: int, cluster: int) -> int:
        """Keys that each block of a cluster keeps of rows so wide: its whole part if it can."""
        return min(self.kept, -(-width // (cluster * KEPT_STEP)) * KEPT_STEP)

    def shared_bytes_for(self, kept: int) -> int:
        """Shared memory of a launch that keeps so many keys in each block."""
        return self.fixed_bytes + 4 * kept

    def constants(self) -> dict[str, int | str]:
        return {
            "MAX_CLUSTER": self.max_cluster,
            "BLOCKS_PER_PROCESSOR": self.blocks_per_processor,
            "FIXED_BYTES": self.fixed_bytes,
        }


def top_positions(
    scores: torch.Tensor, k: int, lengths: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Where the largest scores of each row are: int64 [rows, min(k, width)], ascending, of equal scores the first.

    scores: float32 [rows, width] on a CUDA device; rows may be further apart than `width`. lengths: int64 or int32
    [rows] on the device, how many scores of each row count, all if None; what lies past a row's length is not read.
    -1 follows where a row is shorter than k. NaN counts as larger than every number, and both zeros as equal. out:
    where to write them, contiguous.

    One launch, which depends on shapes alone and waits for nothing. The first call for a device loads kernels: make one
    before a graph is captured. Raises ValueError for what the kernel cannot read.
    """
    _check(scores, k, lengths)
    rows, width = scores.shape
    positions = torch.empty(rows, min(k, width), dtype=torch.int64, device=scores.device) if out is None else out
    if positions.shape != (rows, min(k, width)) or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ValueError(
            f"expected contiguous int64 out [{rows}, {min(k, width)}], found {positions.dtype} {list(positions.shape)}"
        )
    if positions.numel():
        with torch.cuda.device(scores.device):
            on_device(scores.device).launch(scores, lengths, positions)
    return positions


def _check(scores: torch.Tensor, k: int, lengths: torch.Tensor | None) -> None:
    if scores.ndim != 2 or scores.dtype != torch.float32 or not scores.is_cuda or k < 1:
        raise ValueError(
            f"expected float32 scores [rows, width] on a CUDA device and k of at least 1, found {scores.dtype} "
            f"{tuple(scores.shape)} on {scores.device} and k {k}"
        )
    if scores.shape[1] > MAX_WIDTH or (scores.numel() and scores.stride(1) != 1):
        raise ValueError(
            f"expected rows of at most {MAX_WIDTH} scores, side by side, found shape {tuple(scores.shape)} and strides "
            f"{scores.stride()}"
        )
    if lengths is None:
        return
    is_list = lengths.dtype in _LENGTH_TYPES and lengths.shape == scores.shape[:1] and lengths.is_contiguous()
    if not is_list or lengths.device != scores.device:
        raise ValueError(
            f"expected contiguous int64 or int32 lengths [{len(scores)}] on {scores.device}, found {lengths.dtype} "
            f"{tuple(lengths.shape)} on {lengths.device}"
        )


@functools.cache
def on_device(device: torch.device) -> "TopK":
    """The kernels of a device, loaded once."""
    return TopK(device)


def specializations(shared_memory: int) -> tuple[TopKSpecialization, TopKSpecialization]:
    """The kernel for few rows, whose blocks have a processor for themselves, and the one for many rows, of whose blocks
    several run on a processor. shared_memory: bytes that a block may have.
    """
    few = TopKSpecialization(0, MAX_BLOCK_SIZE, 2 * PORTABLE_CLUSTER, 1)
    many = TopKSpecialization(0, 512, PORTABLE_CLUSTER, 3)
    return few.fitted(shared_memory), many.fitted(shared_memory // 2)


@dataclass(frozen=True)
class Geometry:
    """A launch: which kernel, blocks per row, and keys that each block keeps in shared memory."""

    kernel: TopKSpecialization
    cluster: int
    kept: int


def choose_geometry(
    rows: int, width: int, few: TopKSpecialization, many: TopKSpecialization, running: dict[int, int]
) -> Geometry:
    """The launch for scores [rows, width].

    few, many: of `specializations`. running: how many clusters of each size run at the same time with the first, by
    size, ascending from 1.

    Few rows are shared out to as many processors as they can use. If their blocks cannot keep their parts, smaller
    blocks take turns.
    """
    at_once = [size for size, clusters in running.items() if rows <= clusters and size * _LEAST_PART <= width]
    size = max(at_once, default=1)
    if rows <= running[size] and (width <= size * few.kept or size >= PORTABLE_CLUSTER):
        return Geometry(few, size, few.kept_of(width, size))
    sizes = [size for size in running if size <= many.max_cluster]
    size = next((size for size in sizes if width <= size * _MANY_ROWS_PART), sizes[-1])
    return Geometry(many, size, many.kept_of(width, size))


class TopK:
    """The kernels on one device. running: as `choose_geometry` takes it."""

    def __init__(self, device: torch.device) -> None:
        self.specializations = specializations(shared_memory_limit(device))
        self._kernels = {kernel: DeviceKernel(kernel, device) for kernel in self.specializations}
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        self.running = {1: processors, **self._kernels[self.specializations[0]].cluster_sizes()}

    def launch(
        self,
        scores: torch.Tensor,
        lengths: torch.Tensor | None,
        positions: torch.Tensor,
        geometry: Geometry | None = None,
    ) -> None:
        """Fill `positions`, int64 [rows, k], k from 1 to the width. geometry: chosen if None. Otherwise as
        `top_positions`, unchecked.
        """
        rows, width = scores.shape
        geometry = geometry or choose_geometry(rows, width, *self.specializations, self.running)
        kernel = self._kernels[geometry.kernel]
        params = launch_params(scores, lengths, positions, geometry.kept)
        shared_bytes = geometry.kernel.shared_bytes_for(geometry.kept)
        kernel.launch(params, (rows * geometry.cluster, 1, 1), geometry.cluster, shared_bytes)


def launch_params(
    scores: torch.Tensor, lengths: torch.Tensor | None, positions: torch.Tensor, kept: int
) -> ctypes.Structure:
    """The kernel's parameters."""
    return TopKParams(
        scores=scores.data_ptr(),
        lengths=0 if lengths is None else lengths.data_ptr(),
        positions=positions.data_ptr(),
        row_stride=scores.stride(0),
        length_bytes=0 if lengths is None else lengths.itemsize,
        width=scores.shape[1],
        k=positions.shape[1],
        kept=kept,
    )
