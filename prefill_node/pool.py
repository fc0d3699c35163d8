"""How many pages the KV pool of a prefill node has."""

import structlog

from base.errors import StartupError
from base.memory import device_split, human, pool_bytes
from model.config import ModelSpec
from prefill_node.config import PrefillConfig
from ranks.group import Ranks
from service.node_model import fit_context

log = structlog.get_logger(__name__)

_PROMPTS_BY_DEFAULT = 16


def fit_pages(config: PrefillConfig, spec: ModelSpec, ranks: Ranks, to_load: int = 0) -> tuple[ModelSpec, int]:
    """The pages of the pool, and the specification with the context that they hold.

    All ranks have as many. On CPUs they divide the memory of their host, before any has taken some for its pool.
    to_load: bytes of weights that the device is yet to get. Raises StartupError if a context that was asked for does
    not fit.
    """
    ranks.share(None)
    sharing = ranks.per_host if ranks.device.type == "cpu" else 1
    available = pool_bytes(ranks.device, config.mem_fraction_static, to_load * sharing)
    affordable = min(ranks.share(available // sharing // spec.kv_layout.token_bytes))
    return fit_context(spec, config.context_length, lambda spec: _num_pages(config, spec, affordable))


def plan_pages(config: PrefillConfig, spec: ModelSpec, ranks: Ranks) -> tuple[ModelSpec, int]:
    """`fit_pages` once the weights are loaded; logs the reason for their number."""
    if split := device_split(ranks.device, config.mem_fraction_static):
        log.info("sized", what=split)
    spec, pages = fit_pages(config, spec, ranks)
    token_bytes = spec.kv_layout.token_bytes
    log.info(
        "KV pool",
        pages=pages,
        page_size=config.page_size,
        tokens=pages * config.page_size,
        bytes=human(pages * config.page_size * token_bytes),
        why=f"{token_bytes} B per token over {spec.num_layers} layers; "
        + ("--max-total-tokens" if config.max_total_tokens else f"up to {_PROMPTS_BY_DEFAULT} full contexts"),
    )
    return spec, pages


def _num_pages(config: PrefillConfig, spec: ModelSpec, affordable: int) -> int:
    """affordable: tokens. Raises StartupError if they, or those of --max-total-tokens, do not hold a full context."""
    token_bytes = spec.kv_layout.token_bytes
    wanted = config.max_total_tokens or min(affordable, _PROMPTS_BY_DEFAULT * spec.context_length)
    if wanted > affordable:
        raise StartupError(
            f"--max-total-tokens {wanted} takes {human(wanted * token_bytes)}, but {human(affordable * token_bytes)} "
            "may be used; lower it or raise --mem-fraction-static"
        )
    pages = wanted // config.page_size
    if pages * config.page_size < spec.context_length:
        raise StartupError(
            f"a KV pool of {pages} pages of {config.page_size} tokens does not hold one context of "
            f"{spec.context_length}; raise --max-total-tokens or --mem-fraction-static, or lower --context-length"
        )
    return pages
