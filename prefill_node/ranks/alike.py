"""What ranks of a prefill node compare before they load anything."""

from model.spec import ModelSpec
from prefill_node.config import PrefillConfig
from ranks.group import RankGroup
from service.node_model import common_to_ranks


def check_alike(ranks: RankGroup, config: PrefillConfig, spec: ModelSpec) -> None:
    """Raises StartupError if ranks are of other versions or checkpoints, or would compute or send otherwise."""
    ranks.check_equal(
        {
            **common_to_ranks(ranks, config, spec),
            "page_size": config.page_size,
            "attention_backend": config.attention_backend,
            "transfer_protocol": config.transfer_protocol,
        }
    )
