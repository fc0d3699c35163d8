"""How many slabs, host slots and rows the configured memory gives."""

from bisect import bisect_right
from dataclasses import dataclass, replace

from base.block_hashes import BLOCK_TOKENS
from base.errors import StartupError
from base.memory import human
from hisparse.config import MAX_DEVICE_BUFFER_SIZE, HiSparseConfig
from hisparse.slabs import SlabLayout
from kernels.specialization import VECTOR_BYTES
from kvcache.block_cache import BLOCK_BYTES
from kvcache.layout import KVLayout

GIB = 2**30
_FILLING = 2
"""Hot buffers that have slabs in addition to resident rows when one more becomes so: its own, and that of the next
request."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the pools of one decode node: the constructor arguments of HostKVPool and DeviceKVPool.

    config: with the buffers that requests have. max_device_slots: hot slots that there may be at a time; any number if
    None. window: positions that a step of a request may write.
    """

    config: HiSparseConfig
    layout: KVLayout
    max_requests: int
    max_context: int
    index_page_size: int
    num_host_slots: int
    num_slabs: int
    max_device_slots: int | None = None
    has_prefix_cache: bool = False
    window: int = 1

    @property
    def host_bytes(self) -> int:
        return self.num_host_slots * self.layout.token_bytes

    @property
    def prefix_cache_bytes(self) -> int:
        """Main memory that the prefix cache may take in addition to the pool."""
        return self.num_host_slots // BLOCK_TOKENS * BLOCK_BYTES if self.has_prefix_cache else 0

    @property
    def table_bytes(self) -> int:
        """Device memory of page, slot and residency tables: those of DeviceKVPool (int64), and Residency's."""
        size, slab = self.config.device_buffer_size, self.slab
        hot = max(slab.for_slots(size + self.window), self.whole_slabs)
        located = hot * (slab.slots // slab.granule) + self.page_slabs * slab.pages
        residency = 2 * self.max_context + (4 + 1) * size + 4
        of_row = 8 * (1 + located + self.max_context) + self.layout.num_index_layers * residency
        return self.max_requests * of_row

    @property
    def slab_bytes(self) -> int:
        return self.num_slabs * self.slab.num_bytes

    @property
    def device_bytes(self) -> int:
        return self.slab_bytes + self.table_bytes

    @property
    def slab(self) -> SlabLayout:
        return SlabLayout.of(self.layout, self.index_page_size, self.config.device_buffer_size)

    @property
    def max_hot_slabs(self) -> int | None:
        """Slabs that may be hot slots at a time; all if None."""
        return None if self.max_device_slots is None else self.max_device_slots // self.slab.slots

    @property
    def buffer_slabs(self) -> int:
        """Of a full buffer and a window, or of `max_context` tokens if such a request is always short."""
        size = self.config.device_buffer_size
        is_short = self.max_context - 1 + self.window <= size
        return self.slab.for_slots(self.max_context if is_short else size + self.window)

    @property
    def whole_slabs(self) -> int:
        """Of the hot slots of a resident request of `max_context` tokens."""
        return self.slab.for_slots(self.max_context)

    @property
    def page_slabs(self) -> int:
        """Of the index keys of a request of `max_context` tokens."""
        return self.slab.for_pages(self.max_context)

    @property
    def index_slabs(self) -> int:
        """Of the index keys of every token of the host pool, at most those of all running requests."""
        # A request has begun one more slab than its tokens fill.
        of_host = self.slab.for_pages(self.num_host_slots) + self.max_requests
        return min(of_host, self.max_requests * self.page_slabs)

    @property
    def asked_hot_slabs(self) -> int:
        """Of a full hot buffer for every running request, at most `max_hot_slabs`."""
        full = self.max_requests * self.buffer_slabs
        return full if self.max_hot_slabs is None else min(full, self.max_hot_slabs)

    @property
    def asked_slabs(self) -> int:
        """What is wanted at least. There are more where memory is left, for resident rows."""
        return self.asked_hot_slabs + self.index_slabs

    @property
    def has_all_buffers(self) -> bool:
        """Whether all requests can have a full hot buffer at once, or as many as `max_hot_slabs` are."""
        return self.num_slabs >= self.asked_slabs

    @property
    def whole_requests(self) -> int:
        """Requests of `max_context` tokens that are resident if no others run."""
        least, whole, pages = self.buffer_slabs, self.whole_slabs, self.page_slabs
        filling = least if least < whole else 0
        """A row has its buffer until it has all of its slots."""
        most_hot = self.num_slabs if self.max_hot_slabs is None else self.max_hot_slabs

        def with_others(number: int) -> bool:
            hot, index = number * whole + filling, number * pages
            if number < self.max_requests and filling:  # what `DeviceKVPool.can_take` keeps for the next request
                hot, index = hot + least, index + pages
            return hot <= most_hot and hot + index <= self.num_slabs

        return max((number for number in range(self.max_requests + 1) if with_others(number)), default=0)


def step_window(max_drafts: int) -> int:
    """Positions that a step of a request may write: those of its tokens, and those of the draft layer's entries."""
    return max(1, 2 * max_drafts)


def plan_sizes(
    config: HiSparseConfig,
    layout: KVLayout,
    *,
    max_running_requests: int,
    context_length: int,
    index_page_size: int,
    available_host_bytes: int,
    available_device_bytes: int,
    max_device_slots: int | None = None,
    has_prefix_cache: bool = False,
    window: int = 1,
    fill_memory: bool = False,
    largest_buffer: int = 0,
) -> Sizes:
    """Size the tiers. has_prefix_cache: whether the host pool keeps one. window: of Sizes. fill_memory: whether hot
    slots take the device memory that is left, at most `max_device_slots` or those of whole requests. largest_buffer:
    hot slots of a request up to which that memory is first for larger buffers, if the configuration allows them.

    Wanted are a full hot buffer for every running request, at most `max_device_slots`, and slabs for the index keys of
    every token of the host pool, at most those of all running requests. If device memory is short, there are fewer
    slabs, and with `host_to_device_ratio` fewer host slots. Raises StartupError if the host pool exceeds the available
    memory, or if the pools cannot serve one request of `context_length` tokens.
    """
    if min(max_running_requests, context_length, index_page_size) < 1:
        raise StartupError(
            f"max-running-requests ({max_running_requests}), context-length ({context_length}) and page-size "
            f"({index_page_size}) must be at least 1"
        )
    slab = SlabLayout.of(layout, index_page_size, config.device_buffer_size)

    def sized(hot_slabs: int) -> Sizes:
        if config.host_pool_gib is not None:
            host_slots = int(config.host_pool_gib * GIB) // layout.token_bytes
        else:
            assert config.host_to_device_ratio is not None  # HiSparseConfig has one of the two
            host_slots = int(config.host_to_device_ratio * hot_slabs * slab.slots)
        sizes = Sizes(
            config=config,
            layout=layout,
            max_requests=max_running_requests,
            max_context=context_length,
            index_page_size=index_page_size,
            num_host_slots=host_slots,
            num_slabs=0,
            max_device_slots=max_device_slots,
            has_prefix_cache=has_prefix_cache,
            window=window,
        )
        return replace(sizes, num_slabs=hot_slabs + sizes.index_slabs)

    none = sized(0)
    per_request = none.buffer_slabs
    if none.max_hot_slabs is not None and none.max_hot_slabs < per_request:
        raise StartupError(
            f"max-device-slots {max_device_slots} is fewer than one hot buffer of {config.device_buffer_size} + "
            f"{window} slots (in slabs of {slab.slots}: {per_request * slab.slots})"
        )
    # More slots take more bytes, so this is the largest number that fits.
    counts = range(1, none.asked_hot_slabs + 1)
    fitting = bisect_right(counts, available_device_bytes, key=lambda hot: sized(hot).device_bytes)
    if fitting < per_request:
        raise StartupError(
            f"one request needs {human(sized(per_request).device_bytes)} of device memory for hot buffer, "
            f"index pages and tables, available are {human(available_device_bytes)}: lower device_buffer_size, "
            "host_to_device_ratio or host_pool_gib, context-length or max-running-requests"
        )
    sizes = sized(fitting)
    if sizes.host_bytes + sizes.prefix_cache_bytes > available_host_bytes:
        cache = human(sizes.prefix_cache_bytes)
        beside = f", of which the prefix cache takes {cache}" if sizes.prefix_cache_bytes else ""
        raise StartupError(
            f"the host pool needs {human(sizes.host_bytes)}, available are {human(available_host_bytes)}{beside}: "
            "lower host_to_device_ratio or host_pool_gib"
        )
    if sizes.num_host_slots < context_length:
        raise StartupError(
            f"the host pool holds {sizes.num_host_slots} tokens, fewer than one request of context-length "
            f"{context_length}: raise host_to_device_ratio or host_pool_gib, or lower context-length"
        )
    if not sizes.has_all_buffers:
        return sizes
    whole = _with_resident_rows(sizes, available_device_bytes, fill_memory)
    if not config.larger_buffers or whole.whole_requests == max_running_requests:
        return whole
    larger = _with_larger_buffers(sizes, available_device_bytes, largest_buffer)
    return _with_resident_rows(larger, available_device_bytes, fill_memory)


def _with_larger_buffers(sizes: Sizes, available_device_bytes: int, largest: int) -> Sizes:
    """With the largest hot buffers that all requests can have at once, in whole slabs, less what is no multiple of 16:
    the kernel reads a row's tables by 16 bytes where it can.

    Slots that double a buffer save several times as many misses as they would in one row that is whole
    (docs/benchmarks.md, "Eviction").
    """
    config, slots = sizes.config, sizes.slab.slots
    most = min(largest, MAX_DEVICE_BUFFER_SIZE, sizes.max_context)
    counts = range(sizes.buffer_slabs, (most + sizes.window) // slots + 1, max(1, config.top_k // 4 // slots))
    for slabs in reversed(counts):
        buffer = (slabs * slots - sizes.window) // VECTOR_BYTES * VECTOR_BYTES
        larger = replace(sizes, config=replace(config, device_buffer_size=max(config.device_buffer_size, buffer)))
        larger = replace(larger, num_slabs=larger.asked_slabs)
        has_all = larger.asked_hot_slabs == larger.max_requests * larger.buffer_slabs
        if has_all and larger.device_bytes <= available_device_bytes:
            return larger
    return sizes


def _with_resident_rows(sizes: Sizes, available_device_bytes: int, fill_memory: bool) -> Sizes:
    """With the slabs that are left, for requests that are resident."""
    if not sizes.config.resident_rows:
        return sizes
    # The host pool has no more tokens than it has slots.
    in_host = sizes.slab.for_slots(sizes.num_host_slots) + sizes.max_requests
    hot = min(sizes.max_requests * sizes.whole_slabs, in_host) + _FILLING * sizes.buffer_slabs
    if sizes.max_hot_slabs is not None:
        hot = min(hot, sizes.max_hot_slabs)
    elif not fill_memory:
        return sizes
    most = hot + sizes.index_slabs
    fitting = (available_device_bytes - sizes.table_bytes) // sizes.slab.num_bytes
    return replace(sizes, num_slabs=max(sizes.num_slabs, min(most, fitting)))


def describe(sizes: Sizes) -> list[str]:
    """Lines for the log: each pool, its size, and the reason for it."""
    config = sizes.config
    if config.host_pool_gib is not None:
        host_reason = f"host_pool_gib {config.host_pool_gib:g}"
    else:
        host_reason = f"host_to_device_ratio {config.host_to_device_ratio:g}"
    slab, hot = sizes.slab, sizes.num_slabs - sizes.index_slabs
    if not sizes.has_all_buffers:
        reason = f"buffers for {hot // sizes.buffer_slabs} of {sizes.max_requests} running requests, which is what fits"
    elif sizes.asked_hot_slabs < sizes.max_requests * sizes.buffer_slabs:
        reason = f"max-device-slots: buffers for {hot // sizes.buffer_slabs} of {sizes.max_requests} running requests"
    else:
        reason = f"a full buffer for each of {sizes.max_requests} running requests"
        if sizes.num_slabs > sizes.asked_slabs:
            reason += ", and more for those that are resident as a whole"
    prefix_cache = [
        f"prefix cache: up to {sizes.num_host_slots // BLOCK_TOKENS} blocks of {BLOCK_TOKENS} tokens, in host slots "
        f"that no request needs, and {human(sizes.prefix_cache_bytes)} beside them"
    ] * sizes.has_prefix_cache
    return [
        f"host pool: {sizes.num_host_slots} slots, {human(sizes.host_bytes)} "
        f"({sizes.layout.token_bytes} bytes per token, {host_reason})",
        *prefix_cache,
        f"slabs: {sizes.num_slabs}, {human(sizes.slab_bytes)} (each {slab.slots} hot slots or {slab.pages} index pages "
        f"of {sizes.index_page_size} tokens; {sizes.index_slabs} for the index keys of all tokens)",
        f"hot buffers: {config.device_buffer_size} + {sizes.window} slots per request ({reason})",
        f"tables: {human(sizes.table_bytes)} ({sizes.max_requests} rows of {sizes.max_context} positions)",
    ]
