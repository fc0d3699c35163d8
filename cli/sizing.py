"""`hisparse-pd sizing`: what a node of several GPUs holds and can at most do, for a published shape.

Each figure is a formula over the shape, the machine and the flags, computed by the functions that size a node. Steps
and prompts are given by what the hardware takes at least (`model.roofline`). Nothing is measured, no GPU and
no checkpoint are needed.
"""

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property
from textwrap import fill, indent, wrap

import torch
from transformers import AutoConfig

from base.block_hashes import BLOCK_TOKENS
from base.errors import ProcessFailed, StartupError
from cli.config import SizingConfig
from hisparse.config import HiSparseConfig
from hisparse.sizing import GIB, Sizes, plan_sizes, step_window
from kernels.swap_in import largest_hot_size
from kvcache.block_cache import BLOCK_BYTES
from model.config import NetworkConfig, network_config
from model.families import published_config
from model.roofline import RankModel, StepPart, Works, work_of_chunk, work_of_step
from service.config import drafts_of

_PAGE = 64
_PLENTY_GIB = 2.0**20
_MOST_RUNNING = 4096
_COLUMNS = 80
_SHARED_BYTES = 227 << 10
"""Of shared memory that a block of an H100 or H200 may have."""


@dataclass(frozen=True)
class Row:
    """A figure: what it is of, how it comes about, and its value with the unit."""

    what: str
    how: str
    value: str


@dataclass(frozen=True)
class NodeSizing:
    """The figures of a node. Bytes and requests are of one rank where the name does not say otherwise."""

    config: SizingConfig

    @cached_property
    def network(self) -> NetworkConfig:
        return network_config(AutoConfig.for_model(**published_config(self.config.shape)))

    @property
    def drafts(self) -> int:
        """Of a request in a step, at most."""
        return drafts_of(self.config.speculative_num_steps, self.network.draft_layers > 0)

    @cached_property
    def model(self) -> RankModel:
        """One rank's network, without memory for it. Raises StartupError if the shape cannot be divided so."""
        c = self.config
        try:
            return RankModel.build(
                self.network,
                ranks=c.ranks,
                fp8=True,
                context_length=c.context_length,
                kv_cache_dtype=c.kv_cache_dtype,
                device=torch.device("meta"),
                drafts=self.drafts > 0,
            )
        except ValueError as error:
            raise StartupError(f"sizing: {error}") from error

    @property
    def ranks_per_host(self) -> int:
        return self.config.ranks // self.config.nnodes

    @property
    def buffer_size(self) -> int:
        """Hot slots of a request, at least."""
        return self.config.device_buffer_size or 2 * self.model.spec.index_topk

    @property
    def token_bytes(self) -> int:
        return self.model.spec.kv_layout.token_bytes

    @property
    def pool_bytes(self) -> int:
        """Device memory that pools may take, in addition to the weights."""
        free = self.config.device_gib * GIB - self.model.num_bytes
        if free <= 0:
            raise StartupError(
                f"sizing: the weights of one of {self.config.ranks} ranks take {self.model.num_bytes / GIB:.1f} GiB, "
                f"the device has {self.config.device_gib:g}: give more --ranks"
            )
        return int(free * self.config.mem_fraction_static)

    @cached_property
    def host_pool_gib(self) -> int:
        """Of all ranks of a host: whole GiB that leave room for the prefix caches' tables."""
        free = (self.config.host_gib - self.config.reserved_gib) * GIB
        return int(free / (1 + BLOCK_BYTES / BLOCK_TOKENS / self.token_bytes) / GIB)

    def sizes(
        self, running: int, pool_gib: float, context_length: int | None = None, fill_memory: bool = False
    ) -> Sizes:
        """A rank's pools for `running` requests, of full length unless it is given. fill_memory: as of plan_sizes.
        Raises StartupError if not one fits."""
        config = HiSparseConfig(
            self.buffer_size,
            self.model.spec.index_topk,
            host_to_device_ratio=None,
            host_pool_gib=pool_gib,
            larger_buffers=fill_memory and self.config.device_buffer_size is None,
        )
        return plan_sizes(
            config,
            self.model.spec.kv_layout,
            max_running_requests=running,
            context_length=context_length or self.config.context_length,
            index_page_size=_PAGE,
            available_host_bytes=int(2 * _PLENTY_GIB * GIB),
            available_device_bytes=self.pool_bytes,
            has_prefix_cache=True,
            window=step_window(self.drafts),
            fill_memory=fill_memory,
            largest_buffer=largest_hot_size(
                config.top_k, 1 + self.drafts, step_window(self.drafts), self.config.context_length, None, _SHARED_BYTES
            ),
        )

    @property
    def host_tokens(self) -> int:
        """That the host pool of a rank has room for."""
        return int(self.host_pool_gib * GIB / self.ranks_per_host) // self.token_bytes

    @cached_property
    def held(self) -> int:
        """Requests of full length that the host pool has room for."""
        return self.host_tokens // self.config.context_length

    @cached_property
    def fitting(self) -> int:
        """Requests of full length whose hot buffers, index keys and tables device memory has room for."""
        # More requests take more bytes, so this is the first number that does not fit.
        return bisect_left(range(1, _MOST_RUNNING), True, key=lambda running: not self._fits(running))

    def _fits(self, running: int, context_length: int | None = None) -> bool:
        try:
            sizes = self.sizes(running, _PLENTY_GIB, context_length)
        except StartupError:
            return False
        return sizes.has_all_buffers and sizes.device_bytes <= self.pool_bytes

    @property
    def running(self) -> int:
        """Requests that run at a time."""
        return min(self.held, self.fitting)

    def filled(self, running: int) -> Sizes:
        """A rank's pools for `running` requests, with buffers and resident rows that take all memory."""
        return self.sizes(running, self.host_pool_gib / self.ranks_per_host, fill_memory=True)

    def running_with(self, buffer_size: int) -> int:
        """The most requests of full length that have so many hot slots each, if the node chooses how many."""
        most = range(1, self.running + 1)
        return bisect_left(most, True, key=lambda running: self.buffer_of(running) < buffer_size)

    def buffer_of(self, running: int) -> int:
        return self.filled(running).config.device_buffer_size

    @cached_property
    def whole(self) -> int:
        """Requests of full length that are whole in device memory while no others run."""
        return self.filled(self.running).whole_requests

    def check(self) -> None:
        """Raises ProcessFailed if no request of full length fits both kinds of node, with the longest that does."""
        c = self.config
        if self.running and self.prefill_tokens >= c.context_length:
            return
        lengths = range(c.context_length + 1)
        on_device = bisect_left(lengths, True, lo=1, key=lambda tokens: not self._fits(1, tokens)) - 1
        longest = min(self.prefill_tokens, self.host_tokens, on_device) // _PAGE * _PAGE
        raise ProcessFailed(
            f"sizing: no prompt of {c.context_length:,} tokens fits: a prefill node holds {self.prefill_tokens:,}, a "
            f"rank of a decode node {self.host_tokens:,} in host memory and {on_device:,} on the device; "
            + (f"--context-length {longest} fits" if longest else "no other length does")
            + ", or give more --ranks"
            + (", or --kv-cache-dtype fp8_e4m3" if c.kv_cache_dtype != "fp8_e4m3" else "")
        )

    @cached_property
    def step(self) -> Works:
        """The work of a decode step with all requests running."""
        return self._step_of(self.running, min(self.config.new_positions, self.config.context_length))

    def _step_of(self, requests: int, missed: int) -> Works:
        """The work of a decode step. missed: positions per request and layer."""
        c = self.config
        return work_of_step(self.model, requests, c.context_length, missed, requests * c.ranks)

    def limit_ms(self, works: Works, part: StepPart) -> float:
        return sum(work.ms(self.config.link_gb_per_s) for work in works.get(part, ()))

    @property
    def step_limit_ms(self) -> float:
        """What the hardware takes for a step at least. Exchanges between GPUs are not in it."""
        return sum(self.limit_ms(self.step, part) for part in StepPart)

    @property
    def whole_step_limit_ms(self) -> float:
        """Likewise, for a step of `whole` requests, which swaps nothing in."""
        return sum(self.limit_ms(self._step_of(self.whole, 0), part) for part in StepPart)

    @property
    def step_ms(self) -> float:
        """What a step is expected to take."""
        return self.step_limit_ms * self.config.times_limit

    def tokens_per_s(self, requests: int, step_ms: float) -> float:
        """Of the node, with so many requests a rank."""
        return self.config.ranks * requests / step_ms * 1e3

    @property
    def swapped_in_bytes(self) -> float:
        """In a step: what is read out of host memory."""
        return sum(work.link_bytes for work in self.step[StepPart.SWAP_IN])

    @property
    def prefill_tokens(self) -> int:
        """That a prefill node's pool holds: every rank has the KV of all of them."""
        return self.pool_bytes // self.token_bytes

    @cached_property
    def prompt_tokens_per_s(self) -> float:
        """At most, of a prefill node with as many ranks, at the end of a prompt of full length."""
        c = self.config
        block = min(c.chunked_prefill_size // c.ranks, c.context_length) or 1
        works = work_of_chunk(self.model, c.context_length, block, c.ranks)
        return c.ranks * block / sum(self.limit_ms(works, part) for part in StepPart) * 1e3


def rows(config: SizingConfig) -> list[Row]:
    """All figures of such a node. Raises StartupError if there is none, and ProcessFailed as `NodeSizing.check`."""
    if config.ranks % config.nnodes:
        raise StartupError(f"--ranks {config.ranks} with --nnodes {config.nnodes}: each host has as many as the others")
    if config.host_gib <= config.reserved_gib:
        raise StartupError(
            f"--host-gib {config.host_gib:g} with --reserved-gib {config.reserved_gib:g}: nothing is left"
        )
    x, c = NodeSizing(config), config
    x.check()
    layout, tokens, per_host = x.model.spec.kv_layout, c.context_length, x.ranks_per_host
    sizes = x.sizes(x.running, x.host_pool_gib / per_host)
    pool, context, request = gib(x.pool_bytes), gib(tokens * x.token_bytes), gib(sizes.device_bytes / x.running)
    parts = ", ".join(f"{part} {ms:.1f}" for part in StepPart if (ms := x.limit_ms(x.step, part)) >= 0.05)
    limit, step, rate = x.step_limit_ms, x.step_ms, x.prompt_tokens_per_s
    read = per_host * x.swapped_in_bytes

    def in_all(requests: int) -> str:
        return f"{requests} a rank, {requests * c.ranks} in all"

    def output(requests: int, ms: float) -> str:
        return f"{x.tokens_per_s(requests, ms):,.0f} tokens/s, {1e3 / ms:.1f} a request"

    slots, twice = "as given", ""
    if c.device_buffer_size is None:
        slots = "what device memory is left for"
        larger, requests = 2 * x.buffer_size, x.running_with(2 * x.buffer_size)
        twice = f"requests with {larger:,} each | with a `--max-running-requests` of {requests} | {in_all(requests)}\n"
    whole_output = ""
    if x.whole:
        whole, whole_ms = x.whole * c.ranks, x.whole_step_limit_ms
        whole_output = f"""\
output at the limit with these | {whole} / {whole_ms:.1f} ms, nothing swapped in | {output(x.whole, whole_ms)}
"""
    table = f"""\
weights of a GPU, fp8 | what all ranks have, and 1/{c.ranks} of the routed experts | {gib(x.model.num_bytes)}
pools of a GPU | {c.mem_fraction_static:g} x ({c.device_gib:g} GiB - weights) | {pool}
one token | {layout.num_layers} x {layout.item_bytes} B + {layout.num_index_layers} x {layout.index_key_bytes} B \
| {x.token_bytes:,} B
a request of full length, in host memory | {tokens:,} x {x.token_bytes:,} B | {context}
host pools of a machine (`host_pool_gib`) | {c.host_gib:,.0f} GiB, {c.reserved_gib:g} kept for the rest, and the \
prefix caches' tables | {x.host_pool_gib:,} GiB
the prefix caches' tables | {per_host} ranks | {gib(per_host * sizes.prefix_cache_bytes)}
requests that host memory holds | {x.host_pool_gib:,} GiB / {per_host} / {context}, x {c.ranks} ranks | {in_all(x.held)}
device memory of a running request | hot buffer, index keys, tables | {request}
requests that device memory runs | {pool} / {request}, x {c.ranks} ranks: {x.buffer_size:,} hot slots each at least \
| {in_all(x.fitting)}
running requests (`--max-running-requests`) | the less of both | {in_all(x.running)}
hot slots of each of these | {slots} | {x.buffer_of(x.running):,}
{twice}\
of these whole in device memory | while no others run | {in_all(x.whole)}
{whole_output}\
a decode step at the hardware's limit, ms | {parts} | {limit:.1f} ms
output at the limit | {x.running * c.ranks} / {limit:.1f} ms | {output(x.running, limit)}
output expected | a step takes {c.times_limit:g} times its limit: {step:.1f} ms | {output(x.running, step)}
read from a machine's host memory for that | {per_host} x {x.swapped_in_bytes / 1e6:,.0f} MB / {step:.1f} ms \
| {read / step / 1e6:.0f} GB/s
KV pool of a prefill node | {pool} / {x.token_bytes:,} B \
| {x.prefill_tokens:,} tokens, {x.prefill_tokens // tokens} prompts of full length
prompts of a prefill node at the limit | steps of {c.chunked_prefill_size:,} tokens, at the end of a prompt of full \
length | {rate:,.0f} tokens/s
network of a prefill node for that | {rate:,.0f} x {x.token_bytes:,} B | {rate * x.token_bytes / 1e9:.2f} GB/s
"""
    return [Row(*line.split(" | ")) for line in table.splitlines()]


def commands(config: SizingConfig) -> list[str]:
    """The command lines of gateway, prefill and decode node. Words in capitals are the reader's to replace."""
    x, c = NodeSizing(config), config
    of_all = f"--model-path MODEL --key-dir KEYS --context-length {c.context_length}"
    drafts = "" if c.speculative_num_steps == "auto" else f" --speculative-num-steps {c.speculative_num_steps}"
    hosts = f" --nnodes {c.nnodes} --node-rank K --dist-init-addr HOST0:PORT" if c.nnodes > 1 else ""
    of_nodes = f"--gateway GATEWAY:8001 --device cuda --ranks {c.ranks}{hosts} --kv-cache-dtype {c.kv_cache_dtype}"
    of_nodes += f" --mem-fraction-static {c.mem_fraction_static:g} --chunked-prefill-size {c.chunked_prefill_size}"
    given = f'"device_buffer_size": {c.device_buffer_size}, ' if c.device_buffer_size else ""
    tiers = f'{{{given}"host_pool_gib": {x.host_pool_gib}}}'
    return [
        _wrapped(f"hisparse-pd gateway {of_all} --host GATEWAY --api-key-file API_KEYS"),
        _wrapped(f"hisparse-pd prefill {of_all} --host PREFILL {of_nodes}{drafts}"),
        _wrapped(
            f"hisparse-pd decode {of_all} --host DECODE {of_nodes}{drafts} --max-running-requests {x.running}",
            f"--hisparse-config '{tiers}'",
        ),
    ]


def _wrapped(words: str, last: str = "") -> str:
    """A command of several lines for a shell. Flags stay with their values."""
    flags = words.replace(" --", "\n--").splitlines() + [last] * bool(last)
    glued = " ".join(flag.replace(" ", "\0") for flag in flags)
    lines = wrap(glued, _COLUMNS - len(" \\"), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    return " \\\n".join(lines).replace("\0", " ")


def report(config: SizingConfig) -> str:
    """Everything, for a terminal of 80 columns."""
    lines = [
        f"{row.what}{row.value:>{_COLUMNS - len(row.what)}}\n{indent(fill(row.how, _COLUMNS - 4), '    ')}"
        for row in rows(config)
    ]
    return "\n".join([*commands(config), "", *lines])


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"
