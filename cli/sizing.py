"""The worked example of docs/operations.md, computed by the functions that size a node.

`python -m cli.sizing` rewrites it in place; a test checks that it is up to date.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from base.memory import DEFAULT_FRACTION
from hisparse.config import HiSparseConfig
from hisparse.format import DenseFormat
from hisparse.layout import KVLayout
from hisparse.sizing import GIB, Sizes, plan_sizes

OPERATIONS = Path(__file__).parent.parent / "docs" / "operations.md"
_BLOCK = re.compile(r"(<!-- sizing -->\n).*?(<!-- /sizing -->)", re.DOTALL)


FORMAT = DenseFormat(torch.bfloat16, item_dim=512 + 64, index_dim=128)
LAYOUT = KVLayout(tuple(range(61)), FORMAT.item_bytes, FORMAT.index_key_bytes)
"""DeepSeek-V3.2's: kv_lora_rank 512, qk_rope_head_dim 64, index_head_dim 128, an indexer in every layer."""


@dataclass(frozen=True)
class Example:
    """Machines of eight H200 each, and a model with the attention of DeepSeek-V3.2 that fits one of them.

    device_gib: what CUDA reports as free on an idle H200. reserved_gib: host memory for all else on the machine.
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
    """Prompt tokens per second of one prefill process: an assumption, to be measured."""
    miss_rate: float = 0.05
    """Selected items that are not in the hot buffer: an assumption, to be read off the metrics."""

    @property
    def buffer_size(self) -> int:
        """Hot slots of a request, as by default."""
        return 2 * self.top_k

    @property
    def pool_bytes(self) -> int:
        """Device memory that pools may take, once the weights are loaded."""
        return int((self.device_gib - self.weights_gib) * GIB * DEFAULT_FRACTION["cuda"])

    def sizes(self, running: int, pool_gib: float) -> Sizes:
        """A decode process's pools for so many running requests and a host pool of that size."""
        return plan_sizes(
            HiSparseConfig(self.buffer_size, self.top_k, host_to_device_ratio=None, host_pool_gib=pool_gib),
            self.layout,
            max_running_requests=running,
            context_length=self.context,
            index_page_size=self.page_size,
            available_host_bytes=int(self.host_gib * GIB),
            available_device_bytes=self.pool_bytes,
        )

    def most_running(self) -> int:
        """Requests of full length that device memory runs with full hot buffers, were there host memory for them."""
        running = 1
        while True:
            sizes = self.sizes(running + 1, pool_gib=self.host_gib)
            if sizes.num_device_slots < sizes.asked_device_slots:
                return running
            running += 1


def example_block(example: Example) -> str:
    """The example as a command and a table."""
    layout, sizes = example.layout, example.sizes(example.running, example.pool_gib)
    token, item, key = layout.token_bytes, layout.item_bytes, layout.index_key_bytes
    per_request = sizes.device_bytes / example.running
    context_bytes = example.context * token
    prefill_tokens = example.pool_bytes // token
    rate = example.prompt_rate * token
    misses = int(example.running * example.top_k * example.miss_rate) * layout.num_layers * item
    rows = [
        ("one item; one index key", f"{FORMAT.item_dim} x 2 B; {FORMAT.index_dim} x 2 B", f"{item} B; {key} B"),
        (
            "one token",
            f"{layout.num_layers} x {item} B + {layout.num_index_layers} x {key} B",
            f"{token:,} B",
        ),
        ("one request of full length, in host memory", f"{example.context:,} x {token:,} B", _gib(context_bytes)),
        (
            "host pool of a decode process",
            "`host_pool_gib`",
            f"{_gib(sizes.host_bytes)}, {sizes.num_host_slots:,} slots",
        ),
        (
            "requests of full length that it holds",
            f"{_gib(sizes.host_bytes)} / {_gib(context_bytes)}",
            f"{sizes.num_host_slots // example.context}",
        ),
        (
            f"host pools of the machine's {example.gpus} decode processes",
            f"of {example.host_gib:,.0f} GiB, {example.reserved_gib:.0f} kept for the rest",
            _gib(example.gpus * sizes.host_bytes),
        ),
        (
            "device memory for pools",
            f"{DEFAULT_FRACTION['cuda']} x ({example.device_gib:.0f} - {example.weights_gib:.0f}) GiB",
            _gib(example.pool_bytes),
        ),
        (
            "hot buffers",
            f"{example.running} x {sizes.num_device_slots // example.running} x {layout.num_layers} x {item} B",
            _gib(sizes.hot_bytes),
        ),
        (
            "index keys",
            f"{sizes.num_index_pages:,} pages x {example.page_size} x {layout.num_index_layers} x {key} B",
            _gib(sizes.index_bytes),
        ),
        ("tables", f"{example.running} rows", _gib(sizes.table_bytes)),
        ("device memory of a running request", "hot buffer, index keys, tables", _gib(per_request)),
        (
            "requests of full length that HBM would run; with all of their KV in HBM",
            f"{_gib(example.pool_bytes)} / {_gib(per_request)}; / {_gib(context_bytes)}",
            f"{example.most_running()}; {example.pool_bytes // context_bytes}",
        ),
        (
            "KV pool of a prefill process",
            f"{_gib(example.pool_bytes)} / {token:,} B",
            f"{prefill_tokens:,} tokens, {prefill_tokens // example.context} prompts of full length",
        ),
        (
            f"network of a prefill process at {example.prompt_rate:,} tokens/s",
            f"{example.prompt_rate:,} x {token:,} B",
            f"{rate / 1e9:.2f} GB/s, {8 * rate / 1e9:.1f} Gbit/s",
        ),
        (
            f"network of a machine with {example.gpus} of them",
            f"{example.gpus} x {8 * rate / 1e9:.1f} Gbit/s",
            f"{example.gpus * 8 * rate / 1e9:.0f} Gbit/s",
        ),
        (
            "a prompt of full length over 25; 100; 400 Gbit/s",
            f"{context_bytes / 1e9:.2f} GB at line rate",
            "; ".join(f"{8 * context_bytes / gbit / 1e9:.2f} s" for gbit in (25, 100, 400)),
        ),
        (
            f"PCIe for a decode step of {example.running} at {example.miss_rate:.0%} misses",
            f"{example.running} x {example.top_k} x {example.miss_rate:g} x {layout.num_layers} x {item} B",
            f"{misses / 1e6:.0f} MB",
        ),
    ]
    config = f'{{"device_buffer_size": {example.buffer_size}, "host_pool_gib": {example.pool_gib:g}}}'
    command = (
        f"hisparse-pd decode --device cuda:0 --context-length {example.context} "
        f"--max-running-requests {example.running} \\\n    --hisparse-config '{config}' ..."
    )
    table = "\n".join(f"| {what} | {how} | {result} |" for what, how, result in rows)
    return f"```\n{command}\n```\n\n| | how | |\n| --- | --- | --- |\n{table}\n"


def with_example(text: str) -> str:
    """The text of docs/operations.md with the example as it is computed now."""
    text, found = _BLOCK.subn(lambda block: f"{block[1]}{example_block(Example())}{block[2]}", text)
    if not found:
        raise ValueError(f"{OPERATIONS} has no place for the example")
    return text


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.2f} GiB"


if __name__ == "__main__":
    OPERATIONS.write_text(with_example(OPERATIONS.read_text()))
