"""How a top-k is shared out to the blocks of a device."""

import pytest

pytest.importorskip("cuda.bindings")

from kernels.top_k import choose_geometry, specializations

FEW, MANY = specializations(shared_memory=232448)
HOPPER = {1: 132, 2: 66, 4: 32, 8: 16, 16: 7}
AMPERE = {1: 108}


@pytest.mark.parametrize(
    ("rows", "width", "is_few", "cluster"),
    [
        (1, 100, True, 1),
        (1, 8 << 10, True, 2),
        (1, 128 << 10, True, 16),
        (8, 128 << 10, True, 8),
        (16, 64 << 10, True, 8),
        (17, 64 << 10, True, 4),
        (1, 1 << 20, True, 16),
        (16, 1 << 20, True, 8),
        (100, 40 << 10, True, 1),
        (100, 128 << 10, False, 8),
        (4096, 4 << 10, False, 1),
        (512, 32 << 10, False, 2),
        (512, 1 << 20, False, 8),
    ],
)
def test_few_rows_get_all_processors_and_many_small_blocks(rows: int, width: int, is_few: bool, cluster: int) -> None:
    geometry = choose_geometry(rows, width, FEW, MANY, HOPPER)
    assert (geometry.kernel is FEW, geometry.cluster) == (is_few, cluster)
    assert geometry.kept == min(geometry.kernel.kept, -(-width // cluster // 1024) * 1024)


@pytest.mark.parametrize("rows", [1, 1000])
@pytest.mark.parametrize("width", [100, 1 << 20])
def test_a_device_without_clusters_has_one_block_per_row(rows: int, width: int) -> None:
    assert choose_geometry(rows, width, *specializations(shared_memory=101376), AMPERE).cluster == 1


def test_two_blocks_of_the_kernel_for_many_rows_fit_a_processor() -> None:
    assert 2 * (MANY.shared_bytes + 1024) <= 228 * 1024
    assert FEW.shared_bytes <= 232448
    assert all(kernel.kept % 32 == kernel.fixed_bytes % 16 == 0 for kernel in (FEW, MANY))
