"""The kernels' own source, run on the CPU, decides and copies what the CPU backend does."""

import random
import time
from itertools import cycle

import pytest
import torch

from hisparse.residency import Residency
from hisparse.swap_in import Span
from kernels.copy_items import CopyItemsParams, CopySpecialization
from kernels.swap_in import SwapInParams, SwapInSpecialization, hot_granule, seen_bits
from kernels.wait_time import WaitTimeParams, WaitTimeSpecialization
from tests.csrc.emulator import COMPILER, EmulatedKernel
from tests.hisparse.selections import select_by_queries

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

CPU = torch.device("cpu")
LAYERS = 3
"""Of a group."""


class Emulated:
    """The swap-in kernel with pools of its own, beside a `Residency` that says what it should do."""

    def __init__(self, kernel: SwapInSpecialization, cluster: int, rows: int, context: int) -> None:
        self.kernel, self.cluster, self.rows, self.context = EmulatedKernel(kernel), cluster, rows, context
        self.shape = kernel
        self.oracle = Residency(1, rows, context, kernel.hot_size, CPU, kernel.window)
        self.state = Residency(1, rows, context, kernel.hot_size, CPU, kernel.window)
        granule = hot_granule(kernel.hot_size)
        self.identity = [kernel.hot_size] * rows
        most = max(kernel.hot_size + kernel.window, context)
        self.granules = granule * torch.randperm(rows * -(-most // granule)).view(rows, -1)
        self.hot_slots = (self.granules[:, :, None] + torch.arange(granule)).flatten(1)
        self.host_slot_of = torch.randperm(rows * context).view(rows, context)
        self.host = torch.randint(0, 256, (LAYERS, rows * context, kernel.item_bytes), dtype=torch.uint8)
        self.memory = torch.zeros(LAYERS, self.hot_slots.numel() * kernel.item_bytes + 16, dtype=torch.uint8)
        self.fetched = cycle(range(LAYERS + 1))
        self.counters = torch.zeros(4, dtype=torch.int64)

    def step(
        self,
        rows: list[int],
        newest: list[int],
        positions: list[list[list[int]]],
        padding: int,
        first: list[int] | None = None,
        valid: list[int] | None = None,
    ) -> int:
        """positions: per row and query. first: the position of query 0, the newest if None. valid: how many queries
        exist, all if None. Returns how many were cut."""
        size, queries = len(rows), self.shape.queries
        batch, k = size + padding, len(positions[0][0])
        none = [-1] * padding
        given_rows, given_newest, given_first, given_valid = (
            torch.tensor([*numbers, *none]) for numbers in (rows, newest, first or newest, valid or [queries] * size)
        )
        given = torch.tensor([*positions, *[[[5] * k] * queries] * padding])
        slots, host_slots, device_slots = torch.zeros(3, batch, queries * k, dtype=torch.int64)
        counts = torch.full((batch,), -9, dtype=torch.int32)
        left = given_valid.clone()
        identity = torch.tensor([*(self.identity[row] for row in rows), *none])
        state, fetched = self.state, next(self.fetched)
        params = SwapInParams(
            *(tensor.data_ptr() for tensor in (given, given_rows, given_newest, identity, given_first, left)),
            *(tensor.data_ptr() for tensor in (state.position_at, state.hot_of, state.referenced, state.hand)),
            *(tensor.data_ptr() for tensor in (self.granules, self.host_slot_of, self.host, self.memory)),
            *(tensor.data_ptr() for tensor in (slots, host_slots, device_slots, counts, self.counters)),
            self.context,
            self.granules.shape[1],
            self.host.stride(0),
            self.memory.stride(0),
            fetched,
            k,
        )
        before = self.memory.clone()
        counted = self.counters.clone()
        self.kernel.launch(params, (batch * self.cluster, 1, 1), self.cluster)

        last = Span(given_first[:size], given_valid[:size], queries).positions().view(size, queries, 1)
        wanted = torch.where(last >= 0, given[:size], -1)
        selected = torch.where((wanted >= 0) & (wanted <= last), wanted, -1)
        plan = self.oracle.resolve(
            0, given_rows[:size], selected, given_newest[:size], given_valid[:size], identity[:size]
        )
        assert left.tolist() == [*plan.valid.tolist(), *none]
        hot = plan.hot.flatten(1)
        owned = self.hot_slots[given_rows[:size, None], hot.clamp(min=0)]
        assert torch.equal(slots[:size], torch.where(hot >= 0, owned, -1))
        assert bool((slots[size:] == -1).all())
        missed_rows = given_rows[plan.miss_batch]
        expected_host = self.host_slot_of[missed_rows, plan.miss_positions]
        expected_device = self.hot_slots[missed_rows, plan.miss_hot]
        assert counts.tolist() == [*torch.bincount(plan.miss_batch, minlength=size).tolist(), *[0] * padding]
        for listed, expected in ((host_slots, expected_host), (device_slots, expected_device)):
            assert (
                torch.cat([row[:count] for row, count in zip(listed, counts, strict=True)]).tolist()
                == expected.tolist()
            )
        for name in ("position_at", "hot_of", "referenced", "hand"):
            assert torch.equal(getattr(state, name), getattr(self.oracle, name)), name
        items = before[:, :-16].view(LAYERS, -1, self.shape.item_bytes)
        items[:fetched, expected_device] = self.host[:fetched, expected_host]
        assert torch.equal(self.memory, before)
        violations = int((selected != wanted).sum())
        assert (self.counters - counted).tolist() == [
            plan.hits,
            plan.misses,
            plan.misses * self.shape.item_bytes * fetched,
            violations,
        ]
        return int((given_valid[:size] - plan.valid).sum())


@pytest.mark.parametrize(
    ("queries", "window", "top_k", "hot_size", "block_size", "cluster", "item_bytes", "steps", "seen"),
    [
        (1, 1, 1, 1, 32, 1, 8, 20, None),
        (1, 1, 3, 5, 32, 2, 9, 20, 1),
        (1, 1, 6, 6, 64, 8, 16, 12, 3),
        (1, 1, 40, 64, 64, 2, 48, 20, None),
        (1, 1, 64, 64, 32, 1, 31, 15, 5),
        (1, 1, 100, 101, 32, 4, 33, 15, None),
        (1, 1, 70, 300, 128, 1, 1152, 15, 8),
        (1, 1, 90, 1100, 32, 2, 24, 15, 10),
        (1, 1, 300, 310, 32, 1, 40, 10, None),
        (1, 1, 300, 310, 32, 4, 40, 10, 7),
        (1, 6, 40, 64, 64, 2, 16, 15, None),
        (2, 2, 1, 1, 32, 2, 16, 20, 1),
        (2, 4, 64, 64, 32, 4, 16, 12, None),
        (3, 4, 6, 6, 64, 8, 16, 12, None),
        (3, 4, 50, 101, 64, 2, 16, 15, 5),
        (4, 6, 3, 5, 32, 1, 16, 25, None),
        (4, 6, 40, 64, 64, 4, 16, 12, 4),
        pytest.param(1, 2, 3, 5, 32, 1, 16, 20, None, marks=pytest.mark.slow),
        pytest.param(2, 2, 40, 64, 64, 1, 16, 20, 3, marks=pytest.mark.slow),
        pytest.param(2, 2, 30, 70, 32, 2, 16, 15, None, marks=pytest.mark.slow),
        pytest.param(3, 4, 100, 130, 128, 1, 16, 12, None, marks=pytest.mark.slow),
        pytest.param(4, 6, 64, 150, 64, 1, 16, 12, None, marks=pytest.mark.slow),
        pytest.param(4, 6, 20, 300, 32, 2, 16, 12, None, marks=pytest.mark.slow),
    ],
)
def test_the_swap_in_kernel_does_what_the_oracle_does(
    queries: int,
    window: int,
    top_k: int,
    hot_size: int,
    block_size: int,
    cluster: int,
    item_bytes: int,
    steps: int,
    seen: int | None,
) -> None:
    """Hot buffers are small, so that queries are cut. Short rows become long. One is resident at times. Draft passes
    begin inside the window. seen: bits that tell positions apart where repeats are looked for, as many as needed if
    None."""
    torch.manual_seed(top_k)
    rng = random.Random(queries + top_k)
    context = 3 * hot_size + steps * window + 20
    aligned, seen = item_bytes % 16 == 0, seen or seen_bits(context)
    kernel = SwapInSpecialization(top_k, hot_size, item_bytes, aligned, block_size, seen, queries, window)
    emulated = Emulated(kernel, cluster, rows=3, context=context)
    newest = [max(0, hot_size - window - 2), hot_size + 1, 3 * hot_size + 3]
    for residency in (emulated.oracle, emulated.state):
        residency.reset_short(0)
    cut = 0
    for step in range(steps):
        chosen = rng.sample(range(3), rng.randint(1, 3))
        emulated.identity[2] = 2 * context if step % 5 == 4 else hot_size
        k = top_k if step % 3 else rng.randint(1, top_k)
        first = [newest[row] + rng.choice([0, rng.randint(0, window - queries)]) for row in chosen]
        cut += emulated.step(
            chosen,
            [newest[row] for row in chosen],
            [select_by_queries(rng, last, queries, k, hot_size, different=step % 3 == 2) for last in first],
            padding=step % 2,
            first=first,
            valid=[queries if step % 3 or window == 1 else rng.randint(0, queries) for _ in chosen],
        )
        for row in chosen:
            newest[row] += rng.randint(1, queries)
    assert (cut > 0) == (queries * top_k > hot_size)


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("newest", [5, 40])
def test_positions_that_do_not_exist_are_counted_once_and_select_nothing(newest: int, cluster: int) -> None:
    kernel = SwapInSpecialization(4, 8, 16, True, 32, seen_bits(64))
    emulated = Emulated(kernel, cluster, rows=1, context=64)
    emulated.step([0], [newest], [[[newest + 1, 3, 2**40, -2]]], padding=1)
    _, _, _, violations = emulated.counters.tolist()
    assert violations == 3


@pytest.mark.parametrize("cluster", [1, 4])
@pytest.mark.parametrize("newest", [3, 40])
def test_each_query_has_positions_up_to_its_own(newest: int, cluster: int) -> None:
    kernel = SwapInSpecialization(2, 8, 16, True, 32, seen_bits(64), queries=3, window=4)
    emulated = Emulated(kernel, cluster, rows=1, context=64)
    own = [[newest, newest + 1], [newest + 1, newest + 2], [newest + 2, 2**40]]
    emulated.step([0], [newest], [own], padding=1, valid=[2])
    _, _, _, violations = emulated.counters.tolist()
    assert violations == 2, "a query that does not exist violates nothing"


@pytest.mark.parametrize("item_bytes", [8, 9, 12, 16, 17, 31, 36, 48, 65, 132, 513, 656, 1152, 6004])
@pytest.mark.parametrize(("offset", "rows_at_a_time"), [(0, 2), (0, 1), (1, 2), (8, 2)])
def test_items_of_any_size_are_copied_whole_and_nothing_else(item_bytes: int, offset: int, rows_at_a_time: int) -> None:
    torch.manual_seed(item_bytes)
    slots, layers = 40, 2
    source = torch.randint(0, 256, (layers, slots * item_bytes + 16), dtype=torch.uint8)
    target = torch.zeros(layers, slots * item_bytes + 32, dtype=torch.uint8)
    from_slots = torch.stack([torch.randperm(slots)[:20], torch.randperm(slots)[:20]])
    to_slots = torch.randperm(slots).view(2, 20)
    from_slots[0, 3] = to_slots[1, 7] = -1
    counts = torch.tensor([20, 9], dtype=torch.int32)
    total = torch.zeros(1, dtype=torch.int64)
    aligned = item_bytes % 16 == 0 and offset == 0
    EmulatedKernel(CopySpecialization(item_bytes, aligned, block_size=64)).launch(
        CopyItemsParams(
            source.data_ptr(),
            target.data_ptr() + offset,
            source.stride(0),
            target.stride(0),
            *(tensor.data_ptr() for tensor in (from_slots, to_slots, counts, total)),
            20,
            2,
        ),
        (3, rows_at_a_time, layers),
    )

    expected = torch.zeros_like(target)
    for row, count in enumerate(counts.tolist()):
        for old, new in zip(from_slots[row, :count].tolist(), to_slots[row, :count].tolist(), strict=True):
            if old >= 0 and new >= 0:
                item = source[:, old * item_bytes : (old + 1) * item_bytes]
                expected[:, offset + new * item_bytes : offset + (new + 1) * item_bytes] = item
    assert torch.equal(target, expected)
    assert int(total) == int(counts.sum()) * item_bytes * layers


def test_waits_add_up() -> None:
    kernel = EmulatedKernel(WaitTimeSpecialization())
    began, waited = torch.zeros(2, dtype=torch.int64).unbind()
    for _ in range(2):
        before = waited.item()
        kernel.launch(WaitTimeParams(began.data_ptr(), 0), (1, 1, 1))
        assert waited == before
        time.sleep(0.01)
        kernel.launch(WaitTimeParams(began.data_ptr(), waited.data_ptr()), (1, 1, 1))
        assert waited >= before + 10_000_000
