"""Steps that draft: whatever was accepted, each query reads right bytes, and the host has verified tokens only."""

import random
from dataclasses import dataclass

import pytest
import torch

from hisparse.device_pool import DeviceKVPool
from hisparse.residency import Residency
from hisparse.slabs import SlabLayout
from hisparse.step import DecodeStep, SwapInMismatchError
from hisparse.swap_in import CpuSwapIn, Span
from kvcache.extents import HostSlots, common_runs
from kvcache.format import DenseFormat
from kvcache.host_pool import HostKVPool
from kvcache.layout import KVLayout

FORMAT = DenseFormat(torch.float32, item_dim=4, index_dim=4)
LAYOUT = KVLayout((0, 1, 1, 2), FORMAT.item_bytes, FORMAT.index_key_bytes)
MAIN, DRAFT = range(3), range(3, 4)
TOP_K, CONTEXT, ROWS = 4, 60, 4
ACCEPTED = 0
"""The tag of what a token's KV is in the end; what was drafted and rejected has the number of its step."""


@dataclass
class Node:
    """Rows of a node that drafts up to `drafts` tokens. newest: of each row. tags: of each row's positions on the host
    and in its window, for the main network and for the draft layer."""

    drafts: int
    hot_size: int
    rng: random.Random
    page: int = 4
    """Tokens. A slab has three hot slots for each four."""

    def __post_init__(self) -> None:
        self.window = max(1, 2 * self.drafts)
        cpu = torch.device("cpu")
        self.host = HostKVPool(LAYOUT, ROWS * CONTEXT, pin=False)
        slab = SlabLayout.of(LAYOUT, self.page, self.hot_size)
        slabs = slab.for_slots(self.hot_size + self.window) + slab.for_slots(CONTEXT) + slab.for_pages(CONTEXT)
        self.device = DeviceKVPool(LAYOUT, ROWS * slabs, self.page, ROWS, CONTEXT, self.hot_size, cpu, self.window)
        self.residency = Residency(LAYOUT.num_index_layers, ROWS, CONTEXT, self.hot_size, cpu, self.window)
        self.backend = CpuSwapIn(self.host, self.device, self.residency)
        self.newest = [0] * ROWS
        self.host_slots: list[HostSlots] = []
        self.tags: dict[tuple[int, int, bool], int] = {}
        self.steps = self.cut = 0
        for _ in range(ROWS):
            self._admit()

    def _admit(self) -> None:
        last_short = self.hot_size + 1 - self.window
        num_tokens = self.rng.choice([0, max(0, last_short), max(0, last_short) + 1, self.hot_size, 20])
        row = self.device.allocate_row(num_tokens)
        assert row is not None
        slots = self.host.allocate(CONTEXT)
        assert slots is not None
        self.host_slots.append(slots)
        self.device.set_host_slots(row, 0, slots.slots())
        for position in range(num_tokens):
            at = slots.slots()[position]
            for layer in range(LAYOUT.num_layers):
                self.host.kv[layer, at] = FORMAT.encode_items(self._kv(row, layer, position, ACCEPTED))
            for layer in range(LAYOUT.num_index_layers):
                self.host.index_keys[layer, at] = FORMAT.encode_index_keys(self._kv(row, layer, position, ACCEPTED))
        self.backend.load_index_keys(row, num_tokens)
        if num_tokens <= last_short:
            self.backend.preload(row, num_tokens)
            self.residency.reset_short(row)
        else:
            self.residency.reset_empty(row)
        self.newest[row] = num_tokens

    @staticmethod
    def _kv(row: int, layer: int, position: int, tag: int) -> torch.Tensor:
        return torch.tensor([[row, layer, position, tag]], dtype=torch.float32)

    def _turn(self, row: int) -> None:
        """Make the row resident, or a long row of one that is."""
        device, newest = self.device, self.newest[row]
        if device.is_resident(row):
            if newest > self.hot_size:
                self.residency.reset_range(row, device.make_long(row, newest), newest)
        elif newest:
            slabs = device.take(device.slab.for_slots(newest))
            assert slabs is not None
            slots = device.slots_of(slabs)
            half = newest // 2
            self.backend.fill(common_runs(self.host_slots[row].slots()[:half], slots[:half]))
            self.backend.catch_up(row, half, slots[half:newest])
            device.make_resident(row, slabs)

    def step(self) -> None:
        """Verify, accept, draft and back up, for some of the rows and padding."""
        self.steps += 1
        if self.rng.random() < 0.3:
            self._turn(self.rng.randrange(ROWS))
        running = [row for row in range(ROWS) if self.newest[row] < CONTEXT]
        rows = self.rng.sample(running, self.rng.randint(1, min(len(running), ROWS - 1)))
        drafts = self.rng.randint(0, self.drafts)
        for row in rows:
            assert self.device.grow(row, min(CONTEXT, self.newest[row] + self.window))
        batch = [*rows, -1]
        newest = [*(self.newest[row] for row in rows), -1]
        valid = [*(min(self.rng.randint(1, drafts + 1), CONTEXT - self.newest[row]) for row in rows), 0]
        right = [self.rng.randint(0, max(0, count - 1)) for count in valid]
        for row, n, count, drafts_right in zip(batch, newest, valid, right, strict=True):
            for j in range(count):
                self.tags[row, n + j, False] = ACCEPTED if j <= drafts_right else self.steps
        left = self._pass(MAIN, batch, newest, newest, valid, drafts + 1, newest, valid, drafts + 1, backs_up=False)
        self.cut += sum(valid) - sum(left)
        accepted = [self.rng.choice([most, self.rng.randint(0, most)]) for most in map(min, right, left)]
        accepted = [max(0, min(a, count - 1)) for a, count in zip(accepted, left, strict=True)]
        self._draft(batch, newest, accepted, drafts)
        for row, n, a in zip(rows, newest, accepted, strict=False):
            self.newest[row] = n + a + 1
            self._check_host(row)

    def _draft(self, batch: list[int], newest: list[int], accepted: list[int], drafts: int) -> None:
        """The draft layer's KV of what was accepted, and its later iterations."""
        counts = [a + 1 if row >= 0 else 0 for row, a in zip(batch, accepted, strict=True)]
        for row, n, count in zip(batch, newest, counts, strict=True):
            self.tags |= {(row, n + j, True): ACCEPTED for j in range(count)}
        last = [n + a for n, a in zip(newest, accepted, strict=True)]
        one = [int(row >= 0) for row in batch]
        self._pass(DRAFT, batch, newest, last, one, 1, newest, counts, drafts + 1, backs_up=True)
        for _ in range(1, drafts):
            last = [position + 1 for position in last]
            one = [int(row >= 0 and position < CONTEXT) for row, position in zip(batch, last, strict=True)]
            self.tags |= {(row, position, True): self.steps for row, position in zip(batch, last, strict=True)}
            self._pass(DRAFT, batch, newest, last, one, 1, last, one, 1, backs_up=False)

    def _pass(
        self,
        layers: range,
        rows: list[int],
        newest: list[int],
        first: list[int],
        valid: list[int],
        queries: int,
        first_stored: list[int],
        stored: list[int],
        stored_width: int,
        backs_up: bool,
    ) -> list[int]:
        """A pass through these layers. Returns how many queries of each row are not cut."""
        step = DecodeStep(
            self.backend,
            True,
            torch.tensor(rows),
            torch.tensor(newest),
            Span(torch.tensor(first), torch.tensor(valid), queries),
            Span(torch.tensor(first_stored), torch.tensor(stored), stored_width),
            layers,
            CONTEXT,
            backs_up=backs_up,
        )
        of_draft = layers == DRAFT
        places = [(row, n + j) for row, n in zip(rows, first_stored, strict=True) for j in range(stored_width)]

        def new(layer: int) -> torch.Tensor:
            return torch.cat([self._kv(row, layer, p, self.tags.get((row, p, of_draft), -1)) for row, p in places])

        read = []
        selected = torch.empty(0)
        for layer in layers:
            step.append(layer, FORMAT.encode_items(new(layer)))
            index_layer = LAYOUT.index_layer_of[layer]
            if layer == LAYOUT.layers_of(index_layer)[0]:
                step.append_index_keys(index_layer, FORMAT.encode_index_keys(new(index_layer)))
                self._check_index_pages(step, index_layer, of_draft)
                last = [n + j for n in first for j in range(queries)]
                selected = torch.tensor([self._select(position, n) for position, n in self._each(last, newest)])
            read.append((layer, selected, step.swap_in(layer, selected)))
        step.finish()
        step.verify()
        left: list[int] = step.queries.counts.tolist()
        for layer, positions, slots in read:
            for b, row in enumerate(rows):
                for query in range(b * queries, b * queries + left[b]):
                    for position, slot in zip(positions[query].tolist(), slots[query].tolist(), strict=True):
                        self._check_item(step, layer, row, position, slot, of_draft)
        return left

    @staticmethod
    def _each(last: list[int], newest: list[int]) -> list[tuple[int, int]]:
        """Each query's position with the newest of its row."""
        return [(position, newest[at * len(newest) // len(last)]) for at, position in enumerate(last)]

    def _select(self, last: int, newest: int) -> list[int]:
        """Recent or from anywhere, repeated, with gaps and own tokens."""
        low = max(0, last - self.hot_size - 2) if self.rng.random() < 0.5 else 0
        chosen = [self.rng.randint(min(low, max(last, 0)), max(last, 0)) for _ in range(TOP_K)]
        if self.rng.random() < 0.5:
            chosen[self.rng.randrange(TOP_K)] = self.rng.randint(newest, max(last, newest))
        return chosen if self.rng.random() < 0.8 else [*chosen[:-1], -1]

    def _check_item(self, step: DecodeStep, layer: int, row: int, position: int, slot: int, of_draft: bool) -> None:
        if position < 0:
            assert slot == -1
        else:
            tag = self.tags[row, position, of_draft] if position >= self.newest[row] else ACCEPTED
            assert FORMAT.items(step.kv(layer)[slot]).tolist() == [row, layer, position, tag]

    def _check_index_pages(self, step: DecodeStep, index_layer: int, of_draft: bool) -> None:
        pages = step.index_pages(index_layer)
        for entry, length in enumerate(pages.seq_lens.tolist()):
            row = int(step.rows[entry // step.queries.width])
            found = FORMAT.index_keys(pages.keys[pages.page_table[entry]].flatten(0, 1)[:length])
            tags = [self.tags[row, p, of_draft] if p >= self.newest[row] else ACCEPTED for p in range(length)]
            assert found.tolist() == [[row, index_layer, p, tag] for p, tag in enumerate(tags)]

    def _check_host(self, row: int) -> None:
        """Every position below the newest is there, as it was accepted."""
        at = self.device.host_slot_of[row, : self.newest[row]]
        for layer in range(LAYOUT.num_layers):
            expected = [[row, layer, p, ACCEPTED] for p in range(self.newest[row])]
            assert FORMAT.items(self.host.kv[layer][at]).tolist() == expected
        for layer in range(LAYOUT.num_index_layers):
            expected = [[row, layer, p, ACCEPTED] for p in range(self.newest[row])]
            assert FORMAT.index_keys(self.host.index_keys[layer][at]).tolist() == expected


@pytest.mark.parametrize(("hot_size", "page"), [(4, 4), pytest.param(6, 4, marks=pytest.mark.slow), (6, 16), (13, 4)])
@pytest.mark.parametrize("drafts", [0, 1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_whatever_is_accepted_queries_read_right_bytes(drafts: int, hot_size: int, page: int) -> None:
    cut = 0
    for seed in range(2):
        node = Node(drafts, hot_size, random.Random(seed), page)
        while min(node.newest) < CONTEXT:
            node.step()
            node.device.check_integrity()
        assert node.backend.counters().violations == 0
        cut += node.cut
    assert (cut > 0) == (drafts > 0 and hot_size < 13)


def test_a_step_that_backs_up_nothing_leaves_the_host_as_it_is() -> None:
    node = Node(1, 4, random.Random(0))
    before = node.host.kv.clone()
    row, newest = torch.tensor([0]), torch.tensor([node.newest[0]])
    assert node.device.grow(0, node.newest[0] + 2)
    one = Span(newest, torch.tensor([1]), 1)
    step = DecodeStep(node.backend, False, row, newest, one, one, range(0), CONTEXT, backs_up=False)
    step.append(0, torch.full((1, LAYOUT.item_bytes), 7, dtype=torch.uint8))
    step.finish()
    assert torch.equal(node.host.kv, before)


@pytest.mark.parametrize("drafted", [False, True])
def test_verify_tells_the_slots_of_own_tokens_apart(drafted: bool) -> None:
    node = Node(1, 4, random.Random(0))
    row = 0
    assert node.device.grow(row, node.newest[row] + 2)
    rows, newest = torch.tensor([row]), torch.tensor([node.newest[row]])
    own = Span(newest, torch.tensor([2]), 2)
    step = DecodeStep(node.backend, True, rows, newest, own, own, MAIN, CONTEXT)
    slots = step.swap_in(0, torch.stack([newest, newest + 1])[:, :1])
    step.verify()
    slots[int(drafted)] = slots[1 - int(drafted)]
    with pytest.raises(SwapInMismatchError, match=f"position {int(newest) + int(drafted)} is not what lies"):
        step.verify()
