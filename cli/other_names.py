"""Flags of vLLM and SGLang, and what this project calls them."""

from collections.abc import Mapping

_RANKS = "--ranks (of `serve`: --prefill-ranks, --decode-ranks), which divide requests and experts"
OTHER_NAMES: Mapping[str, str] = {
    "--context-len": "--context-length",
    "--data-parallel-size": _RANKS,
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disaggregation-ib-device": "--ib-device",
    "--disaggregation-mode": "the commands `prefill` and `decode`",
    "--disaggregation-transfer-backend": "--transfer-protocol",
    "--dp": _RANKS,
    "--dp-size": _RANKS,
    "--enforce-eager": "--disable-cuda-graph",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--kv-transfer-config": "--transfer-protocol",
    "--max-model-len": "--context-length",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--max-num-seqs": "--max-running-requests",
    "--model": "--model-path",
    "--num-speculative-tokens": "--speculative-num-steps",
    "--speculative-algorithm": "--speculative-num-steps",
    "--speculative-config": "--speculative-num-steps",
    "--tensor-parallel-size": _RANKS,
    "--tp": _RANKS,
    "--tp-size": _RANKS,
}
