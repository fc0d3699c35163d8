"""How large hot buffers may be: what the swap-in kernel has shared memory for."""

import pytest

from base.errors import StartupError
from kernels.swap_in import SwapInSpecialization, default_block_size, largest_hot_size, seen_bits

CONTEXT = 163_840


@pytest.mark.parametrize("kib", [99, 163, 227])
@pytest.mark.parametrize("queries", [1, 2, 4])
def test_the_kernel_of_the_largest_buffer_has_shared_memory_enough(kib: int, queries: int) -> None:
    window = max(1, 2 * (queries - 1))

    def kernel(hot_size: int) -> SwapInSpecialization:
        threads = default_block_size(queries * 2048)
        return SwapInSpecialization(2048, hot_size, 656, True, threads, seen_bits(CONTEXT), queries, window)

    size = largest_hot_size(2048, queries, window, CONTEXT, None, kib << 10)
    if not size:
        assert kernel(2048).shared_bytes > kib << 10
        return
    assert kernel(size).fitted(kib << 10) == kernel(size), "it needs no fewer bits to find repeats by"
    if size < 8 * 2048:
        with pytest.raises(StartupError, match="lower device_buffer_size"):
            kernel(24 * 2048).fitted(kib << 10)
        assert kernel(size + 512).shared_bytes > kib << 10


def test_an_h200_has_room_for_buffers_of_eight_times_top_k() -> None:
    assert [largest_hot_size(2048, q, max(1, 2 * (q - 1)), CONTEXT, None, 227 << 10) for q in (1, 4)] == [16384, 16384]
