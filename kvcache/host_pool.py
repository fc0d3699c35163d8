"""The host tier: every token of every request, in all layers, in DRAM."""

from collections.abc import Collection
from typing import Any

import torch

from base.errors import StartupError
from base.memory import human
from kvcache.extents import NO_SLOTS, HostSlots, SlotAllocator
from kvcache.host_memory import HostMemory, page_aligned
from kvcache.layout import KVLayout, buffer_info
from kvcache.prefix_cache import PrefixCache, allocate_slots
from transfer.memory import BufferInfo, SharedMemory


class HostKVPool:
    """A slot holds one token in all layers: its KV items and, at the same slot, its index keys.

    One reservation and one transfer plan serve both, and a retracted request resumes by another direct admission.

    kv: uint8 [num_layers, num_slots, item_bytes]. index_keys: uint8 [num_index_layers, num_slots, index_key_bytes].
    Both start at a memory page, and each layer is one contiguous buffer. pin: register the memory with CUDA (torch's
    own pinned allocator would round it up to a power of two). shareable: let other processes of the host map it
    (`shared`). cpus: processors near which it should lie. prefix_cache: keep a prefix cache (`prefixes`). Raises
    StartupError if the machine does not have the memory.

    prefixes: the prefix cache, which gives slots up as others need them. So what only the cache owns counts as free.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_slots: int,
        pin: bool,
        shareable: bool = False,
        cpus: Collection[int] | None = None,
        prefix_cache: bool = False,
    ) -> None:
        self.layout = layout
        keys_at = page_aligned(layout.num_layers * num_slots * layout.item_bytes)
        num_bytes = keys_at + layout.num_index_layers * num_slots * layout.index_key_bytes
        self._memory = HostMemory(num_bytes, shareable, cpus)
        self.kv = self._memory.tensor(0, (layout.num_layers, num_slots, layout.item_bytes))
        self.index_keys = self._memory.tensor(keys_at, (layout.num_index_layers, num_slots, layout.index_key_bytes))
        self._slots = SlotAllocator(num_slots)
        self.prefixes = PrefixCache(self._slots) if prefix_cache else None
        self._pinned: list[torch.Tensor] = []
        if pin:
            self._pin(self.kv)
            self._pin(self.index_keys)

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def free(self) -> int:
        """Slots that can be had now, those that only the prefix cache owns included."""
        return self._slots.free + self.cached

    @property
    def cached(self) -> int:
        """Slots that only the prefix cache owns."""
        return 0 if self.prefixes is None else self.prefixes.evictable_slots

    @property
    def used(self) -> int:
        return self.num_slots - self.free

    @property
    def usage(self) -> float:
        """The part of the slots that requests hold, 0 to 1."""
        return self.used / self.num_slots

    def allocate(self, num_tokens: int) -> HostSlots | None:
        """Slots for that many tokens in as few extents as possible, or None if fewer are free."""
        return self.extend(NO_SLOTS, num_tokens)

    def retain(self, slots: HostSlots) -> None:
        """Add an owner to slots that are held already."""
        self._slots.retain(slots.extents)

    def release(self, slots: HostSlots) -> None:
        """Drop an owner; slots without one become free. Raises SlotAccountingError on a double free."""
        self._slots.release(slots.extents)
        if self.prefixes is not None:
            self.prefixes.let_go(slots)

    def extend(self, slots: HostSlots, num_tokens: int) -> HostSlots | None:
        """The slots and `num_tokens` more, or None (nothing taken) if fewer are free."""
        more = allocate_slots(self._slots, self.prefixes, num_tokens)
        return None if more is None else slots.extend(more)

    def num_owned_once(self, slots: HostSlots) -> int:
        """How many of these slots have one owner."""
        return self._slots.num_owned_once(slots.extents)

    def get_contiguous_buf_infos(self) -> BufferInfo:
        """The buffers of the layout; an item is one token in one of them."""
        return buffer_info([*self.kv, *self.index_keys])

    def shared(self) -> SharedMemory | None:
        """How another process of this host maps the pool; None if it is not shareable."""
        return self._memory.shared

    def check_integrity(self) -> None:
        """Raise SlotAccountingError unless the slot books add up."""
        self._slots.check_integrity()
        if self.prefixes is not None:
            self.prefixes.check_integrity(thorough=False)

    def close(self) -> None:
        """Unpin the memory and share it no more. Nothing may copy to or from it any more."""
        while self._pinned:
            _check(_cudart().cudaHostUnregister(self._pinned.pop().data_ptr()))
        self._memory.close()

    def _pin(self, tensor: torch.Tensor) -> None:
        try:
            _check(_cudart().cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0))
        except RuntimeError as error:
            self.close()
            raise StartupError(
                f"{human(tensor.nbytes)} of host memory cannot be pinned ({error}): lower host_to_device_ratio or "
                "host_pool_gib"
            ) from error
        self._pinned.append(tensor)


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(code: Any) -> None:
    torch.cuda.check_error(int(code))
