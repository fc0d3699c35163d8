"""SGLang's figures, and what this project set itself against them.

For 2048 selected positions, 4096 hot slots and items of 1152 bytes.
"""

BATCHES = (1, 4, 16, 64, 128)
MISSES = (0, 32, 128, 512, 2048)
STATED_FLOOR_US = 11.0
"""Launch and events of the run that the stated figures come from."""

_STATED_ROWS = {
    1: (32, 42, 47, 85, 235),
    4: (29, 36, 48, 88, 251),
    16: (32, 44, 80, 223, 802),
    64: (34, 79, 221, 795, 3095),
    128: (35, 127, 436, 1696, 6306),
}
STATED_US = {
    (batch, misses): float(us) for batch, row in _STATED_ROWS.items() for misses, us in zip(MISSES, row, strict=True)
}
"""SGLang 0.5.23's swap-in on an H200, block 960, us per single launch, by batch and misses per request."""

RESOLVE_ABOVE_FLOOR_US = 6.0


def target(batch: int, misses: int) -> float:
    """How many times faster than the stated figure a launch is meant to be; at least."""
    if misses == 0 or batch == 1:
        return 1.7
    if (batch, misses) in {(4, 32), (4, 128), (16, 32)}:
        return 1.3
    if (batch, misses) in {(64, 32), (16, 128)}:
        return 1.1
    return 1 / 1.05
