"""What a prefill node's flags may say. Apart, so that flags are read without what computes."""

from typing import Literal

FetchPolicy = Literal["auto", "always", "never"]
"""Which prefixes are fetched from decode nodes instead of being computed: auto, where that is faster."""
