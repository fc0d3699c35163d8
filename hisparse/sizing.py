"""How many slots, pages and rows the configured memory gives."""

from bisect import bisect_right
from dataclasses import dataclass, replace

from base.block_hashes import BLOCK_TOKENS
from base.errors import StartupError
from base.memory import human
from hisparse.config import MAX_DEVICE_BUFFER_SIZE, HiSparseConfig
from kernels.swap_in import hot_granule
from kvcache.block_cache import BLOCK_BYTES
from kvcache.layout import KVLayout

GIB = 2**30
_FILLING = 2
"""Hot buffers that have slots beside those of resident rows when one more becomes so: its own, and that of the next
request (`hisparse.resident_rows`)."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of the pools of one decode node: the constructor arguments of HostKVPool and DeviceKVPool.

    config: with the buffers that requests have. asked_device_slots: what was wanted at least, a hot buffer for all
    requests at once or `max_device_slots`. There are more where memory is left, for resident rows. window: positions
    that a step of a request may write.
    """

    config: HiSparseConfig
    layout: KVLayout
    max_requests: int
    max_context: int
    index_page_size: int
    num_host_slots: int
    num_device_slots: int
    asked_device_slots: int
    num_index_pages: int
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
    def hot_bytes(self) -> int:
        return self.num_device_slots * self.layout.num_layers * self.layout.item_bytes

    @property
    def index_bytes(self) -> int:
        page_bytes = self.index_page_size * self.layout.index_key_bytes
        return self.num_index_pages * self.layout.num_index_layers * page_bytes

    @property
    def table_bytes(self) -> int:
        """Device memory of page, slot and residency tables: those of DeviceKVPool (int64), and Residency's."""
        size = self.config.device_buffer_size
        granules = -(-max(size + self.window, self.max_context) // self.granule)
        pages = -(-self.max_context // self.index_page_size)
        residency = 2 * self.max_context + (4 + 1) * size + 4
        of_row = 8 * (1 + granules + pages + self.max_context) + self.layout.num_index_layers * residency
        return self.max_requests * of_row

    @property
    def device_bytes(self) -> int:
        return self.hot_bytes + self.index_bytes + self.table_bytes

    @property
    def granule(self) -> int:
        return hot_granule(self.config.device_buffer_size)

    @property
    def slots_per_request(self) -> int:
        """Hot slots of a full buffer and a window, or of `max_context` tokens if such a request is always short."""
        size = self.config.device_buffer_size
        is_short = self.max_context - 1 + self.window <= size
        return self.whole_granules(self.max_context if is_short else size + self.window)

    @property
    def slots_of_whole(self) -> int:
        """Hot slots of a resident request of `max_context` tokens."""
        return self.whole_granules(self.max_context)

    @property
    def whole_requests(self) -> int:
        """Requests of `max_context` tokens that are resident if no others run."""
        least, whole = self.slots_per_request, self.slots_of_whole
        spare = self.num_device_slots - (_FILLING * least if least < whole else 0)
        return min(self.max_requests, max(0, spare) // whole)

    def whole_granules(self, slots: int) -> int:
        return -(-slots // self.granule) * self.granule


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

    Wanted are a full hot buffer for every running request, at most `max_device_slots`, and index pages for every token
    of the host pool, at most those of all running requests. If device memory is short, there are fewer hot slots, and
    with `host_to_device_ratio` fewer host slots and index pages in proportion. Raises StartupError if the host pool
    exceeds the available memory, or if the pools cannot serve one request of `context_length` tokens.
    """
    if min(max_running_requests, context_length, index_page_size) < 1:
        raise StartupError(
            f"max-running-requests ({max_running_requests}), context-length ({context_length}) and page-size "
            f"({index_page_size}) must be at least 1"
        )
    pages_per_row = -(-context_length // index_page_size)

    def sized(device_slots: int) -> Sizes:
        if config.host_pool_gib is not None:
            host_slots = int(config.host_pool_gib * GIB) // layout.token_bytes
        else:
            assert config.host_to_device_ratio is not None  # HiSparseConfig has one of the two
            host_slots = int(config.host_to_device_ratio * device_slots)
        pages = -(-host_slots // index_page_size) + max_running_requests
        return Sizes(
            config=config,
            layout=layout,
            max_requests=max_running_requests,
            max_context=context_length,
            index_page_size=index_page_size,
            num_host_slots=host_slots,
            num_device_slots=device_slots,
            asked_device_slots=device_slots,
            num_index_pages=min(pages, max_running_requests * pages_per_row),
            has_prefix_cache=has_prefix_cache,
            window=window,
        )

    none = sized(0)
    granule, per_request = none.granule, none.slots_per_request
    asked = max_running_requests * per_request
    if max_device_slots is not None:
        if max_device_slots < per_request:
            raise StartupError(
                f"max-device-slots {max_device_slots} is fewer than one hot buffer of {config.device_buffer_size} + "
                f"{window} slots (in granules of {granule}: {per_request})"
            )
        asked = min(asked, max_device_slots // granule * granule)
    # More slots take more bytes, so this is the largest number that fits.
    counts = range(granule, asked + 1, granule)
    fitting = bisect_right(counts, available_device_bytes, key=lambda slots: sized(slots).device_bytes)
    sizes = replace(sized(fitting * granule), asked_device_slots=asked)
    if sizes.num_device_slots < per_request:
        raise StartupError(
            f"one request needs {human(sized(per_request).device_bytes)} of device memory for hot buffer, "
            f"index pages and tables, available are {human(available_device_bytes)}: lower device_buffer_size, "
            "host_to_device_ratio or host_pool_gib, context-length or max-running-requests"
        )
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
    if sizes.num_device_slots < asked:
        return sizes
    whole = _with_resident_rows(sizes, available_device_bytes, max_device_slots, fill_memory)
    if not config.larger_buffers or whole.whole_requests == max_running_requests:
        return whole
    larger = _with_larger_buffers(sizes, available_device_bytes, max_device_slots, largest_buffer)
    return _with_resident_rows(larger, available_device_bytes, max_device_slots, fill_memory)


def _with_larger_buffers(
    sizes: Sizes, available_device_bytes: int, max_device_slots: int | None, largest: int
) -> Sizes:
    """With the largest hot buffers that all requests can have at once, in steps of a quarter of top-k.

    Slots that double a buffer save several times as many misses as they would in one row that is whole
    (docs/benchmarks.md, "Eviction").
    """
    config = sizes.config
    most = min(largest, MAX_DEVICE_BUFFER_SIZE, sizes.max_context)
    for size in reversed(range(config.device_buffer_size, most + 1, max(1, config.top_k // 4))):
        larger = replace(sizes, config=replace(config, device_buffer_size=size))
        slots = larger.max_requests * larger.slots_per_request
        larger = replace(larger, num_device_slots=slots, asked_device_slots=slots)
        if larger.device_bytes <= available_device_bytes and slots <= (max_device_slots or slots):
            return larger
    return sizes


def _with_resident_rows(
    sizes: Sizes, available_device_bytes: int, max_device_slots: int | None, fill_memory: bool
) -> Sizes:
    """With the hot slots that are left, for requests that are resident."""
    if not sizes.config.resident_rows:
        return sizes
    # The host pool has no more tokens than it has slots.
    in_host = sizes.num_host_slots + sizes.max_requests * sizes.granule
    most = min(sizes.max_requests * sizes.slots_of_whole, in_host) + _FILLING * sizes.slots_per_request
    if max_device_slots is not None:
        most = min(most, max_device_slots)
    elif not fill_memory:
        most = sizes.asked_device_slots
    slot_bytes = sizes.layout.num_layers * sizes.layout.item_bytes
    slots = min(most, sizes.num_device_slots + (available_device_bytes - sizes.device_bytes) // slot_bytes)
    return replace(sizes, num_device_slots=max(sizes.num_device_slots, slots // sizes.granule * sizes.granule))


def describe(sizes: Sizes) -> list[str]:
    """Lines for the log: each pool, its size, and the reason for it."""
    config = sizes.config
    if config.host_pool_gib is not None:
        host_reason = f"host_pool_gib {config.host_pool_gib:g}"
    else:
        host_reason = f"host_to_device_ratio {config.host_to_device_ratio:g}"
    full = sizes.max_requests * sizes.slots_per_request
    if sizes.num_device_slots > sizes.asked_device_slots:
        hot_reason = f"{sizes.asked_device_slots} at least, and the rest for requests that are resident as a whole"
    elif sizes.num_device_slots == full:
        hot_reason = f"a full buffer for each of {sizes.max_requests} running requests"
    elif sizes.num_device_slots == sizes.asked_device_slots:
        hot_reason = f"max-device-slots; full buffers for {sizes.max_requests} running requests would be {full}"
    else:
        hot_reason = f"what fits, of {sizes.asked_device_slots} for {sizes.max_requests} running requests"
    prefix_cache = [
        f"prefix cache: up to {sizes.num_host_slots // BLOCK_TOKENS} blocks of {BLOCK_TOKENS} tokens, in host slots "
        f"that no request needs, and {human(sizes.prefix_cache_bytes)} beside them"
    ] * sizes.has_prefix_cache
    return [
        f"host pool: {sizes.num_host_slots} slots, {human(sizes.host_bytes)} "
        f"({sizes.layout.token_bytes} bytes per token, {host_reason})",
        *prefix_cache,
        f"hot slots: {sizes.num_device_slots}, {human(sizes.hot_bytes)} "
        f"({config.device_buffer_size} + {sizes.window} per request; {hot_reason})",
        f"index pages: {sizes.num_index_pages} of {sizes.index_page_size} tokens, {human(sizes.index_bytes)} "
        "(every token of a running request has its index keys on the device)",
        f"tables: {human(sizes.table_bytes)} ({sizes.max_requests} rows of {sizes.max_context} positions)",
    ]
