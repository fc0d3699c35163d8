"""The CPU backend and the CUDA backend side by side: the same pools, the same steps, compared bit by bit."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch

from hisparse.cuda_swap_in import CudaSwapIn, CudaSwapInPlan
from hisparse.device_pool import DeviceKVPool
from hisparse.residency import Residency
from hisparse.swap_in import CpuSwapIn, StepBatch
from kernels.swap_in import hot_granule
from kvcache.extents import HostSlots
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

    def batch(self, rows: list[int], newest: list[int]) -> StepBatch:
        on = self.device.device
        at, last = torch.tensor(rows, device=on), torch.tensor(newest, device=on)
        page = self.device.page_table[at, last // self.device.index_page_size]
        return StepBatch(
            rows=at,
            newest=last,
            newest_slots=self.device.hot_slots(at, last.clamp(max=self.device.device_buffer_size)),
            newest_index_rows=page * self.device.index_page_size + last % self.device.index_page_size,
            newest_host_slots=self.device.host_slot_of[at, last],
        )


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
        seed: int = 0,
    ) -> None:
        self.layout = KVLayout(index_layer_of, item_bytes, index_key_bytes=12)
        self.newest = list(newest)
        self.cluster = cluster
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
        pages = batch * -(-context // 8)
        num_slots = batch * (hot_size + hot_granule(hot_size))
        device = DeviceKVPool(self.layout, num_slots, pages, 8, batch, context, hot_size, on)
        residency = Residency(self.layout.num_index_layers, batch, context, hot_size, on)
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
            if newest <= hot_size:
                residency.reset_short(row)
        return Side(host, device, residency, slots)

    def preload(self, row: int) -> None:
        for backend in (self.on_cpu, self.on_gpu):
            backend.preload(row, self.newest[row])
            backend.load_index_keys(row, self.newest[row])

    def step(
        self, rows: list[int], positions: dict[int, torch.Tensor], dtype: torch.dtype = torch.int64, padding: int = 0
    ) -> None:
        """One decode step of these rows. positions: per index layer, int64 [batch, k], as they were selected."""
        newest = [self.newest[row] for row in rows]
        cpu, gpu = self.cpu.batch(rows, newest), self.gpu.batch(rows, newest)
        items = torch.randint(
            0, 256, (self.layout.num_layers, len(rows), self.layout.item_bytes), generator=self.random
        )
        keys = torch.randint(0, 256, (self.layout.num_index_layers, len(rows), 12), generator=self.random)
        for side, batch in ((self.cpu, cpu), (self.gpu, gpu)):
            on = side.device.device
            side.device.kv[:, batch.newest_slots] = items.to(on, torch.uint8)
            side.device.index_keys.flatten(1, 2)[:, batch.newest_index_rows] = keys.to(on, torch.uint8)
        for index_layer, selected in positions.items():
            self._swap_in(index_layer, cpu, gpu, selected, dtype, padding)
        self.on_cpu.backup(cpu)
        self.on_gpu.backup(gpu)
        torch.cuda.synchronize()
        for row in rows:
            self.newest[row] += 1

    def _swap_in(
        self,
        index_layer: int,
        cpu: StepBatch,
        gpu: StepBatch,
        positions: torch.Tensor,
        dtype: torch.dtype,
        padding: int,
    ) -> None:
        expected = self.on_cpu.resolve(index_layer, cpu, positions)
        size, k = positions.shape
        none = torch.full((padding,), -1)
        plan = self.on_gpu.launch(
            index_layer,
            torch.cat([gpu.rows.cpu(), none]).to(CUDA, dtype),
            torch.cat([gpu.newest.cpu(), none]).to(CUDA, dtype),
            torch.cat([positions, torch.zeros(padding, k, dtype=torch.int64)]).to(CUDA, dtype),
            fetch=True,
            cluster=self.cluster,
        )
        assert plan.slots[:size].cpu().tolist() == expected.slots.tolist()
        assert not (plan.slots[size:] != -1).any()
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
        assert self.on_gpu.counters() == self.on_cpu.counters()
