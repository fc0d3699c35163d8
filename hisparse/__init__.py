"""The KV tiers of a decode node: all tokens in host memory, a hot buffer per request on the device."""

from hisparse.config import HiSparseConfig, parse_config
from hisparse.coordinator import AppendResult, HiSparseCoordinator, Tier
from hisparse.extents import Extent, HostSlots
from hisparse.layout import KVLayout
from hisparse.sizing import Sizes, describe, plan_sizes
from hisparse.step import DecodeStep
from hisparse.swap_in import StagedKV, SwapInCounters
from hisparse.tiers import build_tiers

__all__ = [
    "AppendResult",
    "DecodeStep",
    "Extent",
    "HiSparseConfig",
    "HiSparseCoordinator",
    "HostSlots",
    "KVLayout",
    "Sizes",
    "StagedKV",
    "SwapInCounters",
    "Tier",
    "build_tiers",
    "describe",
    "parse_config",
    "plan_sizes",
]
