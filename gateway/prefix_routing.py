"""Which node takes a request: the one that has its prefix, unless that node is much fuller than another."""

from collections.abc import Mapping, Sequence

TOLERANCE = 1.0
"""Part of the mean load by which a node may be fuller than the emptiest one before its load counts."""


def ranked(nodes: Sequence[str], cached: Mapping[str, int], load: Mapping[str, int]) -> list[str]:
    """The nodes, first that for which cached tokens of the prompt, less tokens of load that are too many, are the most.

    nodes: by any name. cached: tokens of the prompt that a node has, 0 where it is missing. load: outstanding tokens of
    each node. A token that is cached outweighs one token that the node is fuller than the emptiest one, and of that as
    much as the mean load counts for nothing: so sessions do not move for small differences, and a long prefix moves
    only for a large one. Of equal nodes the emptiest comes first, and then the first.
    """
    if not nodes:
        return []
    least = min(load[node] for node in nodes)
    tolerated = least + TOLERANCE * sum(load[node] for node in nodes) / len(nodes)

    def worth(node: str) -> tuple[float, int]:
        return cached.get(node, 0) - max(0.0, load[node] - tolerated), -load[node]

    return sorted(nodes, key=worth, reverse=True)
