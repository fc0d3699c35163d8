"""The CPU backend and the CUDA backend side by side: the same pools, the same steps, compared bit by bit."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from hisparse.cuda_swap_in import CudaSwapIn, CudaSwapInPlan
from hisparse.device_pool import DeviceKVPool
from hisparse.residency import Residency
from hisparse.slabs import SlabLayout
from hisparse.step import DecodeStep
from hisparse.swap_in import CpuSwapIn, Span, StepBatch, SwapInBackend
from kvcache.extents import HostSlots, common_runs
from kvcache.host_pool import HostKVPool
from kvcache.layout import KVLayout

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@dataclass
class Side:
    """One backend with its pools."""

    host: HostKVPool
    device: DeviceKVPool
    residency: Residency
    slots: list[HostSlots]


def make_batch(
    backend: SwapInBackend,
    rows: Sequence[int],
    newest: Sequence[int],
    first: Sequence[int],
    valid: Sequence[int],
    width: int,
) -> StepBatch:
    """The requests of a pass that stores the tokens which its queries belong to."""
    at, last, begin, counts = (
        torch.tensor(numbers, device=backend.device.device) for numbers in (rows, newest, first, valid)
    )
    stored = Span(begin, counts.clone(), width)
    queries = Span(begin, counts, width)
    return DecodeStep(backend, False, at, last, queries, stored, range(0), backend.device.max_context).batch


class Twins:
    """Both backends over pools with the same bytes and the same slots. `newest`: each row's newest position."""

    def __init__(
        self,
        *,
        top_k: int,
        hot_size: int,
        newest: list[int],
        context: int,
        item_bytes: int = 24,
        index_layer_of: tuple[int, ...] = (0, 1, 1),
        block_size: int | None = None,
        cluster: int | None = None,
        window: int = 1,
        seed: int = 0,
    ) -> None:
        self.layout = KVLayout(index_layer_of, item_bytes, index_key_bytes=12)
        self.newest = list(newest)
        self.cluster = cluster
        self.window = window
        self.random = torch.Generator().manual_seed(seed)
        self.cpu = self._side(CPU, hot_size, context)
        self.gpu = self._side(CUDA, hot_size, context)
        self.on_cpu = CpuSwapIn(self.cpu.host, self.cpu.device, self.cpu.residency)
        with ExitStack() as on_failure:
            on_failure.callback(self.close)
            self.on_gpu = CudaSwapIn(self.gpu.host, self.gpu.device, self.gpu.residency, top_k, block_size)
            on_failure.pop_all()

    def close(self) -> None:
        torch.cuda.synchronize()
        self.gpu.host.close()
        self.cpu.host.close()

    def _side(self, on: torch.device, hot_size: int, context: int) -> Side:
        batch = len(self.newest)
        host = HostKVPool(self.layout, batch * context, pin=on.type == "cuda")
        fill = torch.Generator().manual_seed(1)
        host.kv.random_(generator=fill)
        host.index_keys.random_(generator=fill)
        slab = SlabLayout.of(self.layout, 8, hot_size)
        slabs = batch * (slab.for_slots(hot_size + self.window) + slab.for_pages(context)) + 2 * slab.for_slots(context)
        device = DeviceKVPool(self.layout, slabs, 8, batch, context, hot_size, on, self.window)
        residency = Residency(self.layout.num_index_layers, batch, context, hot_size, on, self.window)
        slots = []
        for newest in self.newest:
            row = device.allocate_row(context)
            assert row is not None
            taken = host.allocate(context)
            assert taken is not None
            slots.append(taken)
            # Scattered, as extents never are: what a kernel reads must not depend on it.
            order = torch.randperm(context, generator=torch.Generator().manual_seed(row)).numpy()
            device.set_host_slots(row, 0, taken.slots()[order])
            residency.reset_empty(row)
            if newest <= hot_size + 1 - self.window:
                residency.reset_short(row)
        return Side(host, device, residency, slots)

    def preload(self, row: int) -> None:
        for backend in (self.on_cpu, self.on_gpu):
            backend.preload(row, self.newest[row])
            backend.load_index_keys(row, self.newest[row])

    def turn(self, row: int) -> None:
        """Make the row resident, or a long row of one that is."""
        newest = self.newest[row]
        for backend, side in ((self.on_cpu, self.cpu), (self.on_gpu, self.gpu)):
            device = side.device
            if device.is_resident(row):
                side.residency.reset_range(row, device.make_long(row, newest), newest)
                continue
            slabs = device.take(device.slab.for_slots(device.max_context))
            assert slabs is not None
            slots = device.slots_of(slabs)
            half = newest // 2
            backend.fill(common_runs(device.host_slot_of[row, :half].cpu().numpy(), slots[:half]))
            backend.catch_up(row, half, slots[half:newest])
            device.make_resident(row, slabs)

    def step(
        self,
        rows: list[int],
        positions: dict[int, torch.Tensor],
        padding: int = 0,
        queries: int = 1,
        offsets: Sequence[int] | None = None,
        valid: Sequence[int] | None = None,
        accepted: Sequence[int] | None = None,
    ) -> list[int]:
        """One pass of these rows. Returns how many queries of each are not cut.

        positions: per index layer, int64 [batch * queries, k], as they were selected. offsets: of query 0 from the
        newest position. valid: how many queries exist. accepted: how many tokens each row goes on by; 1 if None.
        """
        newest = [self.newest[row] for row in rows]
        first = [last + by for last, by in zip(newest, offsets or [0] * len(rows), strict=True)]
        cpu, gpu = (
            make_batch(backend, rows, newest, first, valid or [queries] * len(rows), queries)
            for backend in (self.on_cpu, self.on_gpu)
        )
        stored = len(rows) * queries
        items = torch.randint(0, 256, (self.layout.num_layers, stored, self.layout.item_bytes), generator=self.random)
        keys = torch.randint(0, 256, (self.layout.num_index_layers, stored, 12), generator=self.random)
        for backend, batch in ((self.on_cpu, cpu), (self.on_gpu, gpu)):
            on = backend.device.device
            for layer, new in enumerate(items.to(on, torch.uint8)):
                backend.store(new, backend.device.kv[layer], batch.stored_slots)
            for layer, new in enumerate(keys.to(on, torch.uint8)):
                backend.store(new, backend.device_index_keys[layer], batch.stored_index_rows)
        for index_layer, selected in positions.items():
            self._swap_in(index_layer, cpu, gpu, selected, padding)
        self.on_cpu.backup(cpu)
        self.on_gpu.backup(gpu)
        torch.cuda.synchronize()
        for row, by in zip(rows, accepted or [1] * len(rows), strict=True):
            self.newest[row] += by
        return cpu.queries.counts.tolist()

    def _swap_in(
        self,
        index_layer: int,
        cpu: StepBatch,
        gpu: StepBatch,
        positions: torch.Tensor,
        padding: int,
    ) -> None:
        expected = self.on_cpu.resolve(index_layer, cpu, positions)
        size, width = len(cpu.rows), cpu.queries.width
        none = torch.full((padding,), -1)
        rows, newest, identity, first, counts = (
            torch.cat([numbers.cpu(), none]).to(CUDA)
            for numbers in (gpu.rows, gpu.newest, gpu.identity, gpu.queries.first, gpu.queries.counts)
        )
        plan = self.on_gpu.launch(
            index_layer,
            rows,
            newest,
            Span(first, counts, width),
            torch.cat([positions, torch.zeros(padding * width, positions.shape[1], dtype=torch.int64)]).to(CUDA),
            fetch=len(self.layout.layers_of(index_layer)[: 1 + padding]),
            identity=identity,
            cluster=self.cluster,
        )
        gpu.queries.counts.copy_(counts[:size])
        assert gpu.queries.counts.tolist() == cpu.queries.counts.tolist()
        assert plan.slots[: size * width].cpu().tolist() == expected.slots.tolist()
        assert not (plan.slots[size * width :] != -1).any()
        assert plan.miss_counts[size:].tolist() == [0] * padding
        self._compare_misses(plan, expected.miss_host_slots, expected.miss_device_slots)
        for layer, group in enumerate(self.layout.index_layer_of):
            if group == index_layer:
                self.on_cpu.fetch(expected, layer)
                self.on_gpu.fetch(plan, layer)

    def _compare_misses(self, plan: CudaSwapInPlan, host_slots: torch.Tensor, device_slots: torch.Tensor) -> None:
        counts = plan.miss_counts.tolist()
        for written, expected in ((plan.miss_host_slots, host_slots), (plan.miss_device_slots, device_slots)):
            listed = [slot for entry, count in enumerate(counts) for slot in written[entry, :count].tolist()]
            assert listed == expected.tolist()

    def compare(self) -> None:
        """All state, all bytes on both tiers, and the counters are the same."""
        for name in ("position_at", "hot_of", "referenced", "hand"):
            assert torch.equal(getattr(self.gpu.residency, name).cpu(), getattr(self.cpu.residency, name)), name
        assert torch.equal(self.gpu.device.kv.cpu(), self.cpu.device.kv)
        assert torch.equal(self.gpu.device.index_keys.cpu(), self.cpu.device.index_keys)
        assert torch.equal(self.gpu.host.kv, self.cpu.host.kv)
        assert torch.equal(self.gpu.host.index_keys, self.cpu.host.index_keys)
        assert replace(self.on_gpu.counters(), ahead_bytes=0, ahead_wait_s=0.0) == self.on_cpu.counters()
