"""Flags of vLLM and SGLang, and what this project calls them."""

from collections.abc import Mapping

OTHER_NAMES: Mapping[str, str] = {
    "--context-len": "--context-length",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--disaggregation-ib-device": "--ib-device",
    "--disaggregation-mode": "the commands `prefill` and `decode`",
    "--enforce-eager": "--disable-cuda-graph",
    "--gpu-memory-utilization": "--mem-fraction-static",
    "--max-model-len": "--context-length",
    "--max-num-batched-tokens": "--chunked-prefill-size",
    "--max-num-seqs": "--max-running-requests",
    "--model": "--model-path",
    "--num-speculative-tokens": "--speculative-num-steps",
    "--speculative-config": "--speculative-num-steps",
    "--tensor-parallel-size": "--ranks (of `serve`: --prefill-ranks, --decode-ranks), which divide the experts",
    "--tp": "--ranks (of `serve`: --prefill-ranks, --decode-ranks), which divide the experts",
    "--tp-size": "--ranks (of `serve`: --prefill-ranks, --decode-ranks), which divide the experts",
}
