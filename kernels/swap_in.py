"""What csrc/swap_in.cu is compiled with, among it the layout of its shared memory.

`hisparse.cuda_swap_in` launches the kernel.
"""

from dataclasses import dataclass, replace

from base.errors import StartupError
from kernels.specialization import MAX_BLOCK_SIZE, PORTABLE_CLUSTER, VECTOR_BYTES, WARP, Specialization, params_of

MIN_ITEM_BYTES = 8
_MIN_SEEN_BITS = 10
_MOST_OF_TOP_K = 8

SwapInParams = params_of("request.cuh", "SwapInParams")


def hot_granule(device_buffer_size: int) -> int:
    """Consecutive slots that an entry of a row's table stands for: a power of two, at most a 256th of a buffer, and at
    most 16, since slabs (`hisparse.slabs`) consist of whole granules.

    The table of a hot buffer has at most 2048 entries, which fit a kernel's shared memory.
    """
    return min(16, 1 << max(0, (device_buffer_size // 256).bit_length() - 1))


@dataclass(frozen=True)
class SwapInSpecialization(Specialization):
    """csrc/swap_in.cu. top_k: the most positions that a query may select. hot_size: device_buffer_size.

    queries: of each request, at most `window`, which is that of `hisparse.residency`.

    aligned: item size and all bases are multiples of 16 bytes. seen_bits: how many low bits of a position select its
    bit in the bitmap that finds repeats. Misses that share a bit are compared, which takes longer.
    """

    top_k: int
    hot_size: int
    item_bytes: int
    aligned: bool
    block_size: int
    seen_bits: int
    queries: int = 1
    window: int = 1

    entry = "swap_in"
    max_cluster = PORTABLE_CLUSTER

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
        return max(3, (2 * self.most_selected - 1).bit_length())

    @property
    def most_selected(self) -> int:
        """Positions that all queries of a request select."""
        return self.queries * self.top_k

    def shared_offsets(self) -> dict[str, int]:
        """Where each array of the kernel's dynamic shared memory begins, and, as SHARED_BYTES, where the last one ends.

        The kernel is compiled with these offsets. `Shared` of csrc/request.cuh says which arrays reuse the memory of
        SELECTED, POSITION_AT and SEEN once those have been read.
        """
        warps = self.block_size // WARP
        arrays = {
            "SELECTED": 8 * self.most_selected,
            "ARRIVED": 8,
            "POSITION_AT": max(4 * self.hot_size, 8 * self.most_selected),
            "GRANULES": 8 * -(-(self.hot_size + self.window) // hot_granule(self.hot_size)),
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
                f"swap-in of {self.queries} x top_k {self.top_k} positions with device_buffer_size {self.hot_size} "
                f"needs {fitted.shared_bytes} bytes of shared memory per block, this device has {available}: lower "
                "device_buffer_size or speculative-num-steps, or serve a model with a smaller top_k"
            )
        return fitted

    def constants(self) -> dict[str, int | str]:
        return {
            "ITEM_BYTES": self.item_bytes,
            "ALIGNED": int(self.aligned),
            "TOP_K": self.top_k,
            "QUERIES": self.queries,
            "WINDOW": self.window,
            "HOT_SIZE": self.hot_size,
            "HOT_GRANULE": hot_granule(self.hot_size),
            "BUCKET_BITS": self.bucket_bits,
            "SEEN_BITS": self.seen_bits,
            **self.shared_offsets(),
        }


def seen_bits(max_context: int) -> int:
    """As many bits as distinguish all positions of a context of that length."""
    return max(_MIN_SEEN_BITS, (max_context - 1).bit_length())


def default_block_size(selected: int) -> int:
    """Threads per block: four selected positions per thread, and at least 512, so that enough warps copy."""
    wanted = -(-selected // 4)
    return min(MAX_BLOCK_SIZE, max(512, 1 << (wanted - 1).bit_length()))


def largest_hot_size(
    top_k: int, queries: int, window: int, max_context: int, block_size: int | None, available: int
) -> int:
    """The most hot slots, in quarters of top-k, that a block with `available` bytes of shared memory has room for.

    Up to 8 times the top-k: with four queries a request, what an H200 has room for at a top-k of 2048. 0 if none fit.
    block_size: threads, chosen if None.
    """
    threads = block_size or default_block_size(queries * top_k)
    for size in range(_MOST_OF_TOP_K * top_k, top_k - 1, -max(1, top_k // 4)):
        kernel = SwapInSpecialization(
            top_k, size, MIN_ITEM_BYTES, False, threads, seen_bits(max_context), queries, window
        )
        if kernel.shared_bytes <= available:
            return size
    return 0
