"""The debugging check that swap-in returned the slots of the positions that were selected."""

import torch

from hisparse.device_pool import DeviceKVPool
from hisparse.swap_in import StepBatch
from kvcache.host_pool import HostKVPool


class SwapInMismatchError(RuntimeError):
    """A selected position is not where swap-in said it is: invariant 2 is broken."""


def verify_swap_in(
    host: HostKVPool, device: DeviceKVPool, batch: StepBatch, layer: int, positions: torch.Tensor, slots: torch.Tensor
) -> None:
    """Compare, byte by byte, every selected position's device slot with its host copy or the newest slot.

    positions, slots: int64 [batch, k], what the layer selected and swap-in's answer, -1 where there is none.
    Raises ValueError if a position is beyond its row's newest, and SwapInMismatchError, naming the first, if a slot is
    not the position's.
    """
    if bool((positions > batch.newest[:, None]).any()):
        raise ValueError("a position beyond the newest was selected")
    is_newest = positions == batch.newest[:, None]
    expected_newest = batch.newest_slots[:, None].expand_as(slots)
    older = (positions >= 0) & ~is_newest
    wrong = torch.where(is_newest, slots != expected_newest, (slots < 0) != (positions < 0))

    entry_batch, entry_place = (older & ~wrong).nonzero(as_tuple=True)
    host_slots = device.host_slot_of[batch.rows[entry_batch], positions[entry_batch, entry_place]]
    on_device = device.kv[layer][slots[entry_batch, entry_place]].cpu()
    on_host = host.kv[layer][host_slots.cpu()]
    wrong[entry_batch, entry_place] = (on_device != on_host).any(1).to(wrong.device)
    if bool(wrong.any()):
        at, place = (int(index) for index in wrong.nonzero()[0])
        raise SwapInMismatchError(
            f"layer {layer}, row {int(batch.rows[at])}: position {int(positions[at, place])} is not what lies at "
            f"device slot {int(slots[at, place])} ({int(wrong.sum())} such entries)"
        )
