"""The worked examples of docs/operations/install.md, computed by the functions that size a node.

`python -m tests.docs.sizing` rewrites it in place; a test checks that it is up to date.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from base.block_hashes import BLOCK_TOKENS
from base.memory import DEFAULT_FRACTION
from cli.config import SizingConfig
from cli.sizing import commands, rows
from hisparse.config import HiSparseConfig
from hisparse.sizing import GIB, Sizes, plan_sizes
from kvcache.block_cache import BLOCK_BYTES
from kvcache.format import DenseFormat
from kvcache.layout import KVLayout
from model.families import ShapeName

INSTALL = Path(__file__).parents[2] / "docs" / "operations" / "install.md"
_BLOCK = re.compile(r"(<!-- sizing -->\n).*?(<!-- /sizing -->)", re.DOTALL)
_GROUPS = re.compile(r"(<!-- sizing groups -->\n).*?(<!-- /sizing groups -->)", re.DOTALL)
SHAPES: dict[str, ShapeName] = {"DeepSeek-V3.2": "deepseek-v3.2", "GLM-5.2": "glm-5.2"}
_FRACTION = DEFAULT_FRACTION["cuda"]


FORMAT = DenseFormat(torch.bfloat16, item_dim=512 + 64, index_dim=128)
LAYOUT = KVLayout(tuple(range(61)), FORMAT.item_bytes, FORMAT.index_key_bytes)
"""DeepSeek-V3.2's: kv_lora_rank 512, qk_rope_head_dim 64, index_head_dim 128, an indexer in every layer."""


@dataclass(frozen=True)
class Example:
    """Machines of eight H200 each, and a model with the attention of DeepSeek-V3.2 that fits one of them.

    device_gib: what CUDA reports as free on an idle H200. reserved_gib: host memory for all else on the machine.
    prompt_rate: prompt tokens per second of a prefill process, an assumption to be measured. miss_rate: selected items
    that are not in the hot buffer, an assumption to be read off the metrics.
    """

    layout: KVLayout = LAYOUT
    context: int = 65536
    top_k: int = 2048
    page_size: int = 64
    gpus: int = 8
    device_gib: float = 139.0
    weights_gib: float = 60.0
    host_gib: float = 2048.0
    reserved_gib: float = 256.0
    running: int = 40
    pool_gib: float = 216.0
    prompt_rate: int = 10_000
    miss_rate: float = 0.05

    @property
    def buffer_size(self) -> int:
        """Hot slots of a request, as by default."""
        return 2 * self.top_k

    @property
    def pool_bytes(self) -> int:
        """Device memory that pools may take, once the weights are loaded."""
        return int((self.device_gib - self.weights_gib) * GIB * _FRACTION)

    def sizes(self, running: int, pool_gib: float) -> Sizes:
        """A decode process's pools for that many running requests and a host pool of that size."""
        return plan_sizes(
            HiSparseConfig(self.buffer_size, self.top_k, host_to_device_ratio=None, host_pool_gib=pool_gib),
            self.layout,
            max_running_requests=running,
            context_length=self.context,
            index_page_size=self.page_size,
            available_host_bytes=int(self.host_gib * GIB),
            available_device_bytes=self.pool_bytes,
            has_prefix_cache=True,
        )

    def most_running(self) -> int:
        """Requests of full length that device memory holds with full hot buffers, if host memory is no limit."""
        running = 1
        while True:
            sizes = self.sizes(running + 1, pool_gib=self.host_gib - self.reserved_gib)
            if not sizes.has_all_buffers:
                return running
            running += 1


def example_block(example: Example) -> str:
    """The example as a command and a table."""
    x, layout, sizes = example, example.layout, example.sizes(example.running, example.pool_gib)
    token, item, key = layout.token_bytes, layout.item_bytes, layout.index_key_bytes
    layers, index_layers = layout.num_layers, layout.num_index_layers
    context_bytes = x.context * token
    request_bytes = sizes.device_bytes / x.running
    host, pool, context, request = map(_gib, (sizes.host_bytes, x.pool_bytes, context_bytes, request_bytes))
    slab, hot = sizes.slab, sizes.buffer_slabs
    prefill_tokens = x.pool_bytes // token
    rate = x.prompt_rate * token
    gbit = f"{8 * rate / 1e9:.1f} Gbit/s"
    seconds = "; ".join(f"{8 * context_bytes / line / 1e9:.2f} s" for line in (25, 100, 400))
    misses = int(x.running * x.top_k * x.miss_rate) * layers * item
    return f"""```
hisparse-pd decode --device cuda:0 --context-length {x.context} --max-running-requests {x.running} \\
    --hisparse-config '{{"device_buffer_size": {x.buffer_size}, "host_pool_gib": {x.pool_gib:g}}}' ...
```

| | how | |
| --- | --- | --- |
| one item; one index key | {FORMAT.item_dim} x 2 B; {FORMAT.index_dim} x 2 B | {item} B; {key} B |
| one token | {layers} x {item} B + {index_layers} x {key} B | {token:,} B |
| one request of full length, in host memory | {x.context:,} x {token:,} B | {context} |
| host pool of a decode process | `host_pool_gib` | {host}, {sizes.num_host_slots:,} slots |
| requests of full length that it holds | {host} / {context} | {sizes.num_host_slots // x.context} |
| the prefix cache's tables, beside it | {sizes.num_host_slots:,} / {BLOCK_TOKENS} x {BLOCK_BYTES} B \
| {sizes.prefix_cache_bytes / 2**20:.1f} MiB |
| host pools of the machine's {x.gpus} decode processes \
| of {x.host_gib:,.0f} GiB, {x.reserved_gib:.0f} kept for the rest | {_gib(x.gpus * sizes.host_bytes)} |
| device memory for pools | {_FRACTION} x ({x.device_gib:.0f} - {x.weights_gib:.0f}) GiB | {pool} |
| a slab | {slab.num_bytes:,} B | {slab.slots} slots, or index keys of {slab.page_tokens:,} tokens |
| hot buffers | {x.running} x {hot} slabs | {_gib(x.running * hot * slab.num_bytes)} |
| index keys | {sizes.index_slabs:,} slabs | {_gib(sizes.index_slabs * slab.num_bytes)} |
| tables | {x.running} rows | {_gib(sizes.table_bytes)} |
| device memory of a running request | hot buffer, index keys, tables | {request} |
| requests of full length that HBM would run; with all of their KV in HBM \
| {pool} / {request}; / {context} | {x.most_running()}; {x.pool_bytes // context_bytes} |
| KV pool of a prefill process \
| {pool} / {token:,} B | {prefill_tokens:,} tokens, {prefill_tokens // x.context} prompts of full length |
| network of a prefill process at {x.prompt_rate:,} tokens/s \
| {x.prompt_rate:,} x {token:,} B | {rate / 1e9:.2f} GB/s, {gbit} |
| network of a machine with {x.gpus} of them | {x.gpus} x {gbit} | {x.gpus * 8 * rate / 1e9:.0f} Gbit/s |
| a prompt of full length over 25; 100; 400 Gbit/s | {context_bytes / 1e9:.2f} GB at line rate | {seconds} |
| PCIe for a decode step of {x.running} at {x.miss_rate:.0%} misses \
| {x.running} x {x.top_k} x {x.miss_rate:g} x {layers} x {item} B | {misses / 1e6:.0f} MB |
"""


def with_example(text: str) -> str:
    """The text of docs/operations/install.md with the examples as they are computed now."""
    text, found = _BLOCK.subn(lambda block: f"{block[1]}{example_block(Example())}{block[2]}", text)
    text, groups = _GROUPS.subn(lambda block: f"{block[1]}{groups_block()}{block[2]}", text)
    if not (found and groups):
        raise ValueError(f"{INSTALL} has no place for the examples")
    return text


def groups_block() -> str:
    """Nodes of eight GPUs for models that do not fit one: a command and a table for each."""
    blocks = []
    for name, shape in SHAPES.items():
        config = SizingConfig(shape=shape)
        table = "\n".join(f"| {row.what} | {row.how} | {row.value} |" for row in rows(config))
        lines = "\n".join(commands(config))
        blocks.append(f"{name}:\n\n```\n{lines}\n```\n\n| | how | |\n| --- | --- | --- |\n{table}\n")
    return "\n".join(blocks)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"


if __name__ == "__main__":
    INSTALL.write_text(with_example(INSTALL.read_text()))
