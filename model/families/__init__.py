"""The model families that are served. A new one has a file beside this one, and its names here.

Importing this takes no time: the command line reads the names.
"""

from collections.abc import Mapping
from typing import Literal

from model.families.deepseek_v32 import DEEPSEEK_V32
from model.families.family import LayerKind, ModelFamily
from model.families.glm_moe_dsa import GLM_MOE_DSA

FamilyName = Literal["deepseek_v32", "glm_moe_dsa"]
"""`model_type` in config.json."""
ShapeName = Literal["deepseek-v3.2", "glm-5", "glm-5.2"]
"""Published models, whose widths a node may have without their weights."""

FAMILIES: Mapping[FamilyName, ModelFamily] = {"deepseek_v32": DEEPSEEK_V32, "glm_moe_dsa": GLM_MOE_DSA}

__all__ = ["FAMILIES", "FamilyName", "LayerKind", "ModelFamily", "ShapeName"]
