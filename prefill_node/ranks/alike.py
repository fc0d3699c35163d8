"""What ranks of a prefill node compare before they load anything."""

from base.version import VERSION
from control.codec import PROTOCOL_VERSION
from engine.identity import identity_of
from engine.ranks import RankGroup
from model.backends.device import fp8_obstacle
from model.spec import ModelSpec
from prefill_node.config import PrefillConfig


def check_alike(ranks: RankGroup, config: PrefillConfig, spec: ModelSpec) -> None:
    """Raises StartupError if ranks are of other versions or checkpoints, or would compute or send otherwise."""
    ranks.check_equal(
        {
            "version": f"{VERSION} (protocol {PROTOCOL_VERSION})",
            **identity_of(spec).model_dump(),
            "context_length": spec.context_length,
            "page_size": config.page_size,
            "quantization": config.quantization,
            "attention_backend": config.attention_backend,
            "transfer_protocol": config.transfer_protocol,
            "device": ranks.device.type,
            "computes_in_fp8": fp8_obstacle(ranks.device, spec.dtype) is None,
            "ranks": config.ranks,
        }
    )
