"""What typer refuses, as an error of one line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer

from base.errors import StartupError

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
"""Flags of vLLM and SGLang, and what this project calls them."""
UsageError: type[Exception] = typer.BadParameter.__bases__[0]
"""Of which a flag that is unknown is one, too."""


@contextmanager
def refusals() -> Iterator[None]:
    """Raises StartupError for what typer refuses, if one line says why."""
    try:
        yield
    except typer.BadParameter as error:
        raise StartupError(_rejection_reason(error)) from error
    except UsageError as error:
        if (name := getattr(error, "option_name", "")) in OTHER_NAMES:
            raise StartupError(f"{name}: the flag is {OTHER_NAMES[name]}") from error
        raise


def _rejection_reason(error: typer.BadParameter) -> str:
    """The flag, its value, and why that is invalid."""
    from pydantic import ValidationError

    reason = error.__cause__
    if error.param is None or not isinstance(reason, ValidationError):
        return error.format_message()
    first = reason.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    return f"{error.param.opts[0]} {first['input']}: {message[0].lower()}{message[1:]}"
