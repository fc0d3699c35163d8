"""Which part of a model's work one process does."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Process `rank` of the `of` processes that compute one model together.

    Experts are divided by expert and a chunk's tokens in contiguous blocks; all other weights are in every process.
    """

    rank: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.of:
            raise ValueError(f"shard {self.rank} of {self.of}: expected a rank from 0 to {self.of - 1}")

    def experts(self, count: int) -> range:
        """The routed experts of a layer whose weights this process has. Raises ValueError if they do not divide."""
        if count % self.of:
            raise ValueError(f"{count} experts cannot be divided among {self.of} processes")
        share = count // self.of
        return range(self.rank * share, (self.rank + 1) * share)

    def tokens(self, count: int) -> range:
        """The tokens of a chunk that this process computes: blocks that differ by at most one token."""
        return range(self.rank * count // self.of, (self.rank + 1) * count // self.of)


WHOLE = Shard()
"""One process computes everything."""
