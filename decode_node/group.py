"""What a decode process does as a rank of a group before it serves: compare, and divide the host's memory."""

from base.errors import StartupError
from base.memory import human
from decode_node.config import DecodeConfig
from hisparse.sizing import Sizes
from model.spec import ModelSpec
from ranks.group import RankGroup
from service.node_model import common_to_ranks


def check_alike(ranks: RankGroup, config: DecodeConfig, spec: ModelSpec) -> None:
    """Raises StartupError if ranks are of other versions or checkpoints, or would compute steps of other shapes."""
    ranks.check_same_config(
        {
            **common_to_ranks(ranks, config, spec),
            "max_running_requests": config.max_running_requests,
            "disable_cuda_graph": config.disable_cuda_graph,
        }
    )


def check_host_memory(ranks: RankGroup, sizes: Sizes, available: int) -> None:
    """Raises StartupError if the pools of a host's ranks do not fit together. available: bytes before any was made."""
    said = ranks.share_on_host([sizes.host_bytes + sizes.prefix_cache_bytes, available])
    pools = [pool for pool, _ in said]
    least = min(free for _, free in said)
    if sum(pools) > least:
        raise StartupError(
            f"the host pools of {len(pools)} ranks need {human(sum(pools))} together, available are {human(least)}: "
            "lower host_to_device_ratio or host_pool_gib"
        )
