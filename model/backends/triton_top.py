"""The positions of each row's largest scores, as a Triton kernel.

One program holds a chunk of a row in registers and finds its k-th largest score by bisection over the bits of a score.
Where a row has several chunks, the largest of each are the row of a second round, and so on.
"""

import torch
import triton
import triton.language as tl

MAX_K = 8192
_CHUNK = 16384
"""At least twice MAX_K, so that each round halves the row, and below 2**16, so that a word holds two counts."""
_LEAST_CHUNK = 2048
"""Less would only be more variants to compile."""
_ELEMENTS_PER_WARP = 512


def top_positions(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Where the min(k, width) largest scores of each row are: int64, ascending, of equal ones the first.

    scores: float32 [rows, width], contiguous. -1 takes the place of a position whose score is -inf. The launches depend
    on shapes alone and wait for nothing. Raises ValueError for a k above MAX_K.
    """
    rows, width = scores.shape
    k = min(k, width)
    if not 0 < k <= MAX_K or scores.dtype != torch.float32 or not scores.is_contiguous():
        raise ValueError(f"expected contiguous float32 scores and k from 1 to {MAX_K}, found {scores.dtype} and k {k}")
    positions: torch.Tensor | None = None
    while rows:
        block = min(max(triton.next_power_of_2(width), _LEAST_CHUNK), _CHUNK)
        chunks = triton.cdiv(width, block)
        selected = torch.empty(rows, chunks * k, dtype=torch.int64, device=scores.device)
        best = scores.new_empty(selected.shape if chunks > 1 else 0)
        with torch.cuda.device(scores.device):
            _select[(rows, chunks)](
                scores,
                selected if positions is None else positions,
                best,
                selected,
                width,
                k,
                block,
                first=positions is None,
                last=chunks == 1,
                num_warps=min(16, block // _ELEMENTS_PER_WARP),
            )
        if chunks == 1:
            return selected
        scores, positions, width = best, selected, chunks * k
    return torch.empty(0, k, dtype=torch.int64, device=scores.device)


@triton.jit(do_not_specialize=["width", "k"])  # type: ignore[untyped-decorator]
def _select(
    scores: tl.tensor,
    positions: tl.tensor,
    best: tl.tensor,
    selected: tl.tensor,
    width: tl.tensor,
    k: tl.tensor,
    block: tl.constexpr,
    first: tl.constexpr,
    last: tl.constexpr,
) -> None:
    """One chunk of one row. positions: of the scores, which in the first round are their columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    score = tl.load(scores + row * width + column, mask=column < width, other=float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    # As integers in the order of the scores: of negative numbers the larger magnitude is the lesser.
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    threshold = tl.full([], -(2**31), tl.int32)
    count = tl.full([], block, tl.int32)
    step = tl.full([], -(2**31), tl.int32)  # added to the least number, the sign bit makes 0
    while (count != k) & (step != 0):
        candidate = threshold + step
        reached = tl.sum((key >= candidate).to(tl.int32), 0)
        threshold = tl.where(reached >= k, candidate, threshold)
        count = tl.where(reached >= k, reached, count)
        step = (step >> 1) & 0x7FFFFFFF

    above, equal = (key > threshold).to(tl.int32), (key == threshold).to(tl.int32)
    room = k - tl.sum(above, 0)
    # Both counts in one scan.
    so_far = tl.cumsum((above << 16) + equal, 0)
    equal_so_far = so_far & 0xFFFF
    keep = (above > 0) | ((equal > 0) & (equal_so_far <= room))
    place = (row * tl.num_programs(1) + tl.program_id(1)) * k + (so_far >> 16) + tl.minimum(equal_so_far, room) - 1
    position = column.to(tl.int64) if first else tl.load(positions + row * width + column, mask=keep, other=-1)
    tl.store(selected + place, tl.where(score == float("-inf"), -1, position), mask=keep)
    if not last:
        tl.store(best + place, score, mask=keep)
