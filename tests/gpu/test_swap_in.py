"""The CUDA backend decides and copies exactly what the CPU backend does."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from base.errors import StartupError
from hisparse.cuda_swap_in import CudaSwapInPlan
from hisparse.swap_in import Span, StagedKV
from kernels.wait_time import WaitTimer
from tests.gpu.swap_in_twins import CUDA, Twins, make_batch
from tests.hisparse.selections import select, select_by_queries
from tests.hisparse.test_residency import adversarial_sequences


@contextmanager
def twins(**options: Any) -> Iterator[Twins]:
    both = Twins(**options)
    try:
        yield both
        both.compare()
    finally:
        both.close()


class Shape(NamedTuple):
    top_k: int
    hot_size: int
    block_size: int | None
    cluster: int | None
    item_bytes: int = 64


SHAPES = [
    Shape(1, 1, 32, 1, 8),
    Shape(3, 5, 32, 2, 9),
    Shape(5, 5, 64, 8, 16),
    Shape(8, 33, 32, 4, 24),
    Shape(40, 64, 64, 1, 31),
    Shape(64, 64, 32, 2, 17),
    Shape(100, 101, 128, 4, 33),
    Shape(70, 300, 512, 8, 48),
]
SMALL_ITEMS = (8, 9, 15, 16, 17, 23, 31, 32, 33, 40, 47, 49, 63, 64, 65)
LARGE_ITEMS = (100, 511, 512, 513, 656, 1000, 1152, 1157, 2048, 2064, 6004)


def step_of_queries(both: Twins, rng: random.Random, rows: list[int], queries: int, k: int, hot_size: int) -> int:
    """A step in one index layer or both. Returns how many queries were cut."""
    offsets = [rng.choice([0, rng.randint(0, both.window - queries)]) for _ in rows]
    valid = [rng.choice([queries, rng.randint(1, queries)]) for _ in rows]
    positions = {}
    for layer in [0, 1] if rng.random() < 0.5 else [rng.randrange(2)]:
        chosen = [
            select_by_queries(rng, both.newest[row] + by, queries, k, hot_size, different=rng.random() < 0.2)
            for row, by in zip(rows, offsets, strict=True)
        ]
        positions[layer] = torch.tensor(chosen).flatten(0, 1)
    left = both.step(
        rows,
        positions,
        padding=rng.choice([0, 0, 1, 3]),
        queries=queries,
        offsets=offsets,
        valid=valid,
        accepted=[rng.randint(1, count) for count in valid],
    )
    return sum(valid) - sum(left)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("drafts", [0, 1, 2, 3])
def test_thousands_of_random_steps(drafts: int, shape: Shape) -> None:
    top_k, hot_size, rng = shape.top_k, shape.hot_size, random.Random(shape.top_k + drafts)
    steps, rows, window = 300 if drafts else 1000, 5, max(1, 2 * drafts)
    context = 4 * hot_size + steps * (drafts + 1) + 2 * window
    newest = [max(0, hot_size - window - 3), hot_size, hot_size + 1, 2 * hot_size + 2, 4 * hot_size]
    with twins(**shape._asdict(), newest=newest, context=context, window=window) as both:
        for row, last in enumerate(newest):
            if last <= hot_size + 1 - window:
                both.preload(row)
        cut = 0
        for step in range(steps):
            chosen = rng.sample(range(rows), rng.randint(1, rows))
            if rng.random() < 0.02:
                both.turn(rows - 1)
            k = top_k if rng.random() < 0.7 else rng.randint(1, top_k)
            cut += step_of_queries(both, rng, chosen, rng.randint(1, drafts + 1), k, hot_size)
            if step % 50 == 0:
                both.compare()
        assert cut > 0 or (drafts + 1) * top_k <= hot_size


@pytest.mark.parametrize("queries", [2, 3, 4])
def test_a_few_steps_of_several_queries(queries: int) -> None:
    """Short enough for compute-sanitizer (benchmarks/gpu.sh)."""
    rng, hot_size, window = random.Random(queries), 64, 2 * (queries - 1)
    newest = [hot_size - 2 * window, 2 * hot_size, 3 * hot_size]
    with twins(
        top_k=40, hot_size=hot_size, newest=newest, context=5 * hot_size, item_bytes=48, cluster=2, window=window
    ) as both:
        both.preload(0)
        for _ in range(6):
            step_of_queries(both, rng, [0, 1, 2], queries, 40, hot_size)
        both.compare()


@pytest.mark.parametrize("shape", [Shape(40, 64, 64, 1, 48), Shape(40, 64, 64, 2, 31), Shape(70, 100, 128, 8, 1152)])
def test_a_few_steps_of_every_kind(shape: Shape) -> None:
    """Short enough for compute-sanitizer (benchmarks/gpu.sh)."""
    top_k, hot_size, rng = shape.top_k, shape.hot_size, random.Random(0)
    newest = [hot_size - 2, 2 * hot_size, 3 * hot_size]
    with twins(**shape._asdict(), newest=newest, context=4 * hot_size) as both:
        both.preload(0)
        for step in range(6):
            positions = torch.tensor([select(rng, last, top_k, hot_size) for last in both.newest])
            both.step([0, 1, 2], {0: positions, 1: positions}, padding=step % 2)
        both.compare()


@pytest.mark.parametrize("size", [6, 96])
@pytest.mark.parametrize("case", range(8))
def test_adversarial_sequences(size: int, case: int) -> None:
    context = 5 * size
    _, sequence = adversarial_sequences(size, context)[case]
    with twins(top_k=size, hot_size=size, newest=[context], context=context + len(sequence) + 1) as both:
        for positions in sequence:
            both.step([0], {0: torch.tensor([positions])})
            both.compare()


@pytest.mark.parametrize(
    ("queries", "shape"),
    [
        (1, Shape(2048, 4096, None, None)),
        (1, Shape(2048, 4096, None, 1)),
        (1, Shape(2048, 2048, 1024, 2)),
        (1, Shape(2048, 6001, 256, 8)),
        (1, Shape(5000, 9000, None, 4)),
        *(
            (queries, Shape(2048, hot_size, None, cluster, 24))
            for queries, hot_size in [(2, 4096), (2, 2048), (3, 4096), (4, 4096), (4, 8192), (4, 16384)]
            for cluster in (None, 1, 8)
        ),
    ],
)
def test_sizes_of_real_models(queries: int, shape: Shape) -> None:
    generator = torch.Generator().manual_seed(3)
    top_k, hot_size, rows, context, window = shape.top_k, shape.hot_size, 3, 20000, max(1, 2 * (queries - 1))
    newest = [context - 200, hot_size + 1, hot_size - 20]
    with twins(**shape._asdict(), newest=newest, context=context, window=window) as both:
        both.preload(2)
        scores = [torch.rand(context, generator=generator) for _ in range(rows)]
        for step in range(40 if queries == 1 else 12):
            drift = [0.02, 0.3, 1.0][step % 3]
            positions = torch.full((rows, queries, top_k), -1)
            for row in range(rows):
                for query in range(queries):
                    scores[row] += drift * torch.rand(context, generator=generator)
                    length = both.newest[row] + query + 1
                    chosen = scores[row][:length].topk(min(top_k, length)).indices
                    positions[row, query, : len(chosen)] = chosen
            selected = positions.flatten(0, 1)
            both.step(
                list(range(rows)),
                {0: selected, 1: selected},
                queries=queries,
                accepted=[step % queries + 1] * rows,
            )
            both.compare()


@pytest.mark.parametrize("item_bytes", [*SMALL_ITEMS, *LARGE_ITEMS])
def test_items_of_any_size_at_any_address(item_bytes: int) -> None:
    """Later layers begin where the layers before them end, so that bases are as uneven as the items."""
    rng = random.Random(item_bytes)
    with twins(
        top_k=24, hot_size=30, newest=[200, 250], context=300, item_bytes=item_bytes, index_layer_of=(0, 0, 0, 1)
    ) as both:
        for _ in range(12):
            positions = {
                layer: torch.tensor([select(rng, both.newest[row], 24, 30) for row in (0, 1)]) for layer in (0, 1)
            }
            both.step([0, 1], positions)
            both.compare()


def test_a_captured_step_replays_on_new_positions() -> None:
    """The graph holds the launches; positions, lengths and rows, padding included, are read when it is replayed."""
    rng = random.Random(0)
    size, k, hot_size = 3, 40, 64
    with twins(top_k=k, hot_size=hot_size, newest=[300, 400, 20], context=600, item_bytes=48) as both:
        both.preload(2)
        rows = torch.tensor([0, 1, 2, -1], device=CUDA)
        newest = torch.tensor([*both.newest, -1], device=CUDA)
        one, identity = Span(newest, torch.ones_like(newest), 1), torch.full_like(rows, hot_size)
        positions = torch.full((4, k), -1, device=CUDA)

        def launch(layer: int, rows: torch.Tensor) -> CudaSwapInPlan:
            return both.on_gpu.launch(layer, rows, newest, one, positions, fetch=1, identity=identity)

        launch(0, rows.clone().fill_(-1))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plans = [launch(layer, rows) for layer in (0, 1)]
            both.on_gpu.fetch(plans[1], 2)
        for _ in range(60):
            chosen = torch.tensor([select(rng, both.newest[row], k, hot_size) for row in range(size)])
            batch = make_batch(both.on_cpu, [0, 1, 2], both.newest, both.newest, [1, 1, 1], 1)
            positions[:size] = chosen.to(CUDA)
            newest[:size] = batch.newest.to(CUDA)
            graph.replay()
            for layer in (0, 1):
                expected = both.on_cpu.resolve(layer, batch, chosen)
                assert plans[layer].slots[:size].cpu().tolist() == expected.slots.tolist()
                both._compare_misses(plans[layer], expected.miss_host_slots, expected.miss_device_slots)
                for group_layer in ((0,), (1, 2))[layer]:
                    both.on_cpu.fetch(expected, group_layer)
            both.newest = [last + 1 for last in both.newest]


def test_what_a_recorded_step_copies_ahead_is_counted() -> None:
    """The second layer of a group, for three queries; and the wait for it, however short."""
    rng = random.Random(1)
    with twins(top_k=40, hot_size=64, newest=[300, 400, 500], context=600, item_bytes=48) as both:
        chosen = torch.tensor([select(rng, newest, 40, 64) for newest in both.newest])
        on_cpu, on_gpu = (
            make_batch(backend, [0, 1, 2], both.newest, both.newest, [1, 1, 1], 1)
            for backend in (both.on_cpu, both.on_gpu)
        )
        positions = chosen.to(CUDA)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan = both.on_gpu.resolve(1, on_gpu, positions)
            for layer in (1, 2):
                both.on_gpu.fetch(plan, layer)
        graph.replay()
        torch.cuda.synchronize()
        expected = both.on_cpu.resolve(1, on_cpu, chosen)
        for layer in (1, 2):
            both.on_cpu.fetch(expected, layer)

        counted = both.on_gpu.counters()
        assert counted.misses > 0
        assert counted.ahead_bytes == 48 * counted.misses == counted.bytes // 2
        assert 0 < counted.ahead_wait_s < 1


def test_a_wait_is_as_long_as_events_say() -> None:
    other, timer = torch.cuda.Stream(), WaitTimer(torch.device("cuda", torch.cuda.current_device()))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    between_ms = 0.0
    for _ in range(3):
        with torch.cuda.stream(other):
            torch.cuda._sleep(20_000_000)
        with timer.wait():
            begin.record()
            torch.cuda.current_stream().wait_stream(other)
            end.record()
        torch.cuda.synchronize()
        between_ms += begin.elapsed_time(end)
    assert between_ms > 15
    assert timer.waited.item() / 1e6 == pytest.approx(between_ms, rel=0.1)


def test_a_staged_prompt_arrives_on_the_host() -> None:
    with twins(top_k=4, hot_size=8, newest=[40], context=64, item_bytes=33) as both:
        generator = torch.Generator().manual_seed(9)
        kv = torch.randint(0, 256, (3, 50, 33), generator=generator, dtype=torch.uint8)
        keys = torch.randint(0, 256, (2, 50, 12), generator=generator, dtype=torch.uint8)
        order = torch.randperm(50, generator=generator)[:37]
        slots = torch.randperm(64, generator=generator)[:37]
        for backend, on in ((both.on_cpu, "cpu"), (both.on_gpu, "cuda")):
            backend.stage(StagedKV(list(kv.to(on)), list(keys.to(on)), order.to(on), lambda: None), slots)
        torch.cuda.synchronize()


@pytest.mark.parametrize("newest", [5, 40])
def test_positions_beyond_the_newest_are_counted_and_read_nothing(newest: int) -> None:
    with twins(top_k=4, hot_size=8, newest=[newest], context=64) as both:
        both.step([0], {0: torch.tensor([[newest + 1, 3, 2**40, -2]])})
        assert both.on_gpu.counters().violations == 3


@pytest.mark.parametrize("cluster", [1, 4])
def test_misses_without_a_slot_are_counted_and_copy_nothing(cluster: int) -> None:
    """Position 5 has no host slot, 6 has none for its victim, 7 has neither, and 5 is missed twice."""
    with twins(top_k=6, hot_size=8, newest=[40], context=64, cluster=cluster) as both:
        for side in (both.cpu, both.gpu):
            side.device.host_slot_of[0, [5, 7]] = -1
            side.device.hot_granules[0, [2, 3]] = -1
        both.step([0], {1: torch.tensor([[4, 5, 6, 7, 5, 8]])})
        assert both.on_gpu.counters().violations == 3
        assert both.on_gpu.counters().misses == 5


def test_what_does_not_fit_the_device_is_refused_at_construction() -> None:
    with pytest.raises(StartupError, match="bytes of shared memory per block, this device has"):
        Twins(top_k=30000, hot_size=32000, newest=[10], context=64)


def test_what_the_kernel_cannot_read_is_refused() -> None:
    both = Twins(top_k=4, hot_size=8, newest=[40], context=64)
    row = torch.tensor([0], device=CUDA)
    one = Span(row, row + 1, 1)

    def selected(queries: int, k: int) -> torch.Tensor:
        return torch.zeros(queries, k, dtype=torch.int64, device=CUDA)

    with pytest.raises(ValueError, match="1 to 4 positions, found 1 with 5"):
        both.on_gpu.launch(0, row, row, one, selected(1, 5), fetch=1, identity=row)
    with pytest.raises(ValueError, match=r"tensors of int64 on cuda:0, found one of torch\.int32"):
        both.on_gpu.launch(0, row, row.int(), one, selected(1, 4), fetch=1, identity=row)
    with pytest.raises(ValueError, match="1 to 1 queries, the window being 1, found 2"):
        both.on_gpu.launch(0, row, row, Span(row, row + 1, 2), selected(2, 4), fetch=1, identity=row)
    both.close()
