"""The constants that a kernel is compiled with, among them the layout of the swap-in kernel's shared memory."""

from dataclasses import dataclass, replace
from typing import Literal

from base.errors import StartupError

WARP = 32
MAX_BLOCK_SIZE = 1024
PORTABLE_CLUSTER = 8
"""Blocks of a cluster that every device with clusters supports."""
KEPT_STEP = 1024
"""What a block of the top-k kernel keeps is a multiple of this, so that there are few different launches."""
MIN_ITEM_BYTES = 8
MAX_SCORED = 1024
"""Sequences of a launch that scores pages: each takes 8 bytes of the shared memory of every block."""
VECTOR_BYTES = 16
_MIN_SEEN_BITS = 10

IndexType = Literal["int32", "int64"]
_C_TYPES: dict[IndexType, str] = {"int32": "int", "int64": "long long"}


def hot_granule(device_buffer_size: int) -> int:
    """Consecutive slots that a row owns at a time: a power of two, so that rounding up costs at most 1/256 of a buffer.

    A row's hot slots are then known by at most 512 numbers, which fit a kernel's shared memory.
    """
    return 1 << max(0, (device_buffer_size // 256).bit_length() - 1)


@dataclass(frozen=True)
class CopySpecialization:
    """csrc/copy_items.cu. aligned: item size and all bases are multiples of 16 bytes."""

    item_bytes: int
    aligned: bool
    block_size: int = 256

    source = "copy_items.cu"
    entry = "copy_items"
    shared_bytes = 0
    max_cluster = 1
    architecture_features = ""

    def defines(self) -> dict[str, str]:
        return {
            "THREADS": str(self.block_size),
            "ITEM_BYTES": str(self.item_bytes),
            "ALIGNED": str(int(self.aligned)),
        }


@dataclass(frozen=True)
class SwapInSpecialization:
    """csrc/swap_in.cu. top_k: the most positions that a launch may select. hot_size: device_buffer_size.

    index_type: of rows and newest positions. position_type: of selected positions. aligned: as above. block_size:
    threads per block. seen_bits: how many low bits of a position select its bit in the bitmap that finds repeats.
    Misses that share a bit are compared, which takes longer.
    """

    top_k: int
    hot_size: int
    item_bytes: int
    index_type: IndexType
    position_type: IndexType
    aligned: bool
    block_size: int
    seen_bits: int

    source = "swap_in.cu"
    entry = "swap_in"
    max_cluster = PORTABLE_CLUSTER
    architecture_features = ""

    def __post_init__(self) -> None:
        """Raises StartupError for what the kernel does not support and HiSparseConfig does not refuse."""
        if self.item_bytes < MIN_ITEM_BYTES:
            raise StartupError(f"swap-in needs items of at least {MIN_ITEM_BYTES} bytes, found {self.item_bytes}")
        if self.block_size % WARP or not WARP <= self.block_size <= MAX_BLOCK_SIZE:
            raise StartupError(
                f"swap_in_block_size must be a multiple of {WARP} up to {MAX_BLOCK_SIZE}, found {self.block_size}"
            )

    @property
    def bucket_bits(self) -> int:
        """Of the hash table in which repeated misses meet: at least twice as many buckets as positions."""
        return max(3, (2 * self.top_k - 1).bit_length())

    def shared_offsets(self) -> dict[str, int]:
        """Where each array of the kernel's dynamic shared memory begins, and, as SHARED_BYTES, where the last one ends.

        The kernel is compiled with these offsets. `Shared` of csrc/request.cuh says which arrays reuse the memory of
        SELECTED, POSITION_AT and SEEN once those have been read.
        """
        warps = self.block_size // WARP
        arrays = {
            "SELECTED": 8 * self.top_k,
            "ARRIVED": 8,
            "POSITION_AT": max(4 * self.hot_size, 8 * self.top_k),
            "GRANULES": 8 * -(-(self.hot_size + 1) // hot_granule(self.hot_size)),
            "SEEN": max(2**self.seen_bits // 8, 4 * 2**self.bucket_bits),
            "PROTECT": self.hot_size,
            "TOTALS": 4 * warps,
            "KINDS": 4 * warps,
            "AT_HAND": 4,
        }
        offsets, end = {}, 0
        for name, num_bytes in arrays.items():
            offsets[f"SHARED_{name}"] = end
            end += -(-num_bytes // VECTOR_BYTES) * VECTOR_BYTES
        return {**offsets, "SHARED_BYTES": end}

    @property
    def shared_bytes(self) -> int:
        return self.shared_offsets()["SHARED_BYTES"]

    def fitted(self, available: int) -> "SwapInSpecialization":
        """This, with fewer `seen_bits` if it needs more than `available` bytes of shared memory per block.

        Raises StartupError if it needs more all the same.
        """
        fitted = self
        while fitted.shared_bytes > available and fitted.seen_bits > _MIN_SEEN_BITS:
            fitted = replace(fitted, seen_bits=fitted.seen_bits - 1)
        if fitted.shared_bytes > available:
            raise StartupError(
                f"swap-in with top_k {self.top_k} and device_buffer_size {self.hot_size} needs {fitted.shared_bytes} "
                f"bytes of shared memory per block, this device has {available}: lower top_k (or device_buffer_size)"
            )
        return fitted

    def defines(self) -> dict[str, str]:
        return {
            "THREADS": str(self.block_size),
            "ITEM_BYTES": str(self.item_bytes),
            "ALIGNED": str(int(self.aligned)),
            "TOP_K": str(self.top_k),
            "HOT_SIZE": str(self.hot_size),
            "HOT_GRANULE": str(hot_granule(self.hot_size)),
            "INDEX_T": _C_TYPES[self.index_type],
            "POSITION_T": _C_TYPES[self.position_type],
            "BUCKET_BITS": str(self.bucket_bits),
            "SEEN_BITS": str(self.seen_bits),
            **{name: str(offset) for name, offset in self.shared_offsets().items()},
        }


@dataclass(frozen=True)
class TopKSpecialization:
    """csrc/top_k.cu. kept: the most keys that a launch may keep in the shared memory of a block. max_cluster: the most
    blocks of a row, a power of two. blocks_per_processor: how many of them a processor must have registers for.
    """

    kept: int
    block_size: int
    max_cluster: int
    blocks_per_processor: int

    source = "top_k.cu"
    entry = "top_k"
    architecture_features = ""

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

    def defines(self) -> dict[str, str]:
        return {
            "THREADS": str(self.block_size),
            "MAX_CLUSTER": str(self.max_cluster),
            "BLOCKS_PER_PROCESSOR": str(self.blocks_per_processor),
            "FIXED_BYTES": str(self.fixed_bytes),
        }


@dataclass(frozen=True)
class ScoreSpecialization:
    """csrc/score_pages.cu. heads: 32 or 64, of the indexer. stages: pieces of 16 keys that each warp fetches ahead."""

    heads: int
    stages: int
    block_size: int = 512

    source = "score_pages.cu"
    entry = "score_pages"
    max_cluster = 1
    architecture_features = "a"

    @property
    def fixed_bytes(self) -> int:
        """Shared memory beside the list of sequences: queries, where they may begin, pieces with a barrier, totals."""
        warps, piece, alignment = self.block_size // WARP, 16 * 132, 1024
        return alignment + 128 * self.heads + warps * self.stages * (piece + 8) + 8 * warps

    @property
    def shared_bytes(self) -> int:
        """Of the largest batch."""
        return self.shared_bytes_for(MAX_SCORED)

    def shared_bytes_for(self, batch: int) -> int:
        """Shared memory of a launch for so many sequences."""
        return self.fixed_bytes + 4 * (2 * batch + 1)

    def defines(self) -> dict[str, str]:
        return {
            "THREADS": str(self.block_size),
            "HEADS": str(self.heads),
            "STAGES": str(self.stages),
            "FIXED_BYTES": str(self.fixed_bytes),
        }


@dataclass(frozen=True)
class PromptScoreSpecialization:
    """csrc/score_prompt.cu. heads: 32 or 64, of the indexer. stages: rounds of four queries in shared memory, at least
    2."""

    heads: int
    stages: int
    block_size: int = 512

    source = "score_prompt.cu"
    entry = "score_prompt"
    max_cluster = 1
    architecture_features = "a"

    @property
    def shared_bytes(self) -> int:
        """Queries and weights of all rounds, and where they may begin."""
        alignment, queries = 1024, 4
        return alignment + self.stages * queries * self.heads * (128 + 4)

    def defines(self) -> dict[str, str]:
        return {
            "THREADS": str(self.block_size),
            "HEADS": str(self.heads),
            "STAGES": str(self.stages),
            "FIXED_BYTES": str(self.shared_bytes),
        }


@dataclass(frozen=True)
class AttendSpecialization:
    """csrc/attend_items.cu."""

    block_size: int = 384

    source = "attend_items.cu"
    entry = "attend_items"
    max_cluster = 1
    architecture_features = "a"

    @property
    def shared_bytes(self) -> int:
        """Queries, two tiles of items, three numbers for each of their rows or heads, gates, and alignment."""
        tile, alignment = 64 * 2 * (512 + 64), 1024
        return 3 * tile + 3 * 2 * 64 * 4 + 6 * 8 + alignment

    def defines(self) -> dict[str, str]:
        return {"THREADS": str(self.block_size), "FIXED_BYTES": str(self.shared_bytes)}


Specialization = (
    CopySpecialization
    | SwapInSpecialization
    | TopKSpecialization
    | ScoreSpecialization
    | PromptScoreSpecialization
    | AttendSpecialization
)


def seen_bits(max_context: int) -> int:
    """As many bits as distinguish all positions of a context of that length."""
    return max(_MIN_SEEN_BITS, (max_context - 1).bit_length())


def default_block_size(top_k: int) -> int:
    """Threads per block: four selected positions per thread, and at least 512, so that enough warps copy."""
    wanted = -(-top_k // 4)
    return min(MAX_BLOCK_SIZE, max(512, 1 << (wanted - 1).bit_length() if wanted > 1 else 1))
