"""How long a prompt waits for its KV once it is computed, where sending goes on while chunks compute."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.percentiles import Percentiles
from benchmarks.transfer import wire
from benchmarks.transfer.cases import Protocol, short
from benchmarks.transfer.overlap_model import LAYERS
from benchmarks.transfer.overlap_prefill import CHUNK_TOKENS, PrefillSide, prefill_side
from transfer.choices import ChecksumMode

ROUNDS = 5
SLACK = 1.5
"""Seconds that a chunk computes for each second that sending it takes."""


@dataclass(frozen=True)
class Overlap:
    """alone: seconds that sending takes where nothing is computed. waits: seconds from the end of the computation until
    the prompt is there and verified, where each chunk computes for `chunk_seconds`. admissions: seconds that putting it
    on the (CPU) device took then.
    """

    protocol: Protocol
    tokens: int
    num_bytes: int
    checksums: int
    chunk_seconds: float
    alone: tuple[float, ...]
    waits: tuple[float, ...]
    admissions: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median wait as a part of the median transfer alone."""
        return Percentiles.of(self.waits).p50 / Percentiles.of(self.alone).p50

    def __str__(self) -> str:
        return (
            f"{self.protocol} {short(self.tokens)} tokens in chunks of {short(CHUNK_TOKENS)}: "
            f"the transfer alone takes {1000 * Percentiles.of(self.alone).p50:.1f} ms; computed at "
            f"{1000 * self.chunk_seconds:.1f} ms per chunk, the prompt is ready to be admitted "
            f"{1000 * Percentiles.of(self.waits).p50:.1f} ms after its last chunk: {self.ratio:.1%}"
        )


def measure_overlap(
    link: wire.Link, protocol: Protocol, tokens: int, ib_device: str, checksums: ChecksumMode
) -> Overlap:
    """Let the target ask a prefill node of this process for prompts: both on one machine, whose clock they share.

    Raises StartupError if the target loses a prompt.
    """
    with prefill_side(link.local_host, protocol, tokens, ib_device, checksums) as side:
        link.ask(wire.OpenDecode(protocol=protocol.value, prefill=side.peer, tokens=tokens), wire.Done)
        # The first one connects.
        _rounds(link, side, 1, chunk_seconds=0.0)
        alone = [answer.transfer_seconds for _, answer in _rounds(link, side, ROUNDS, chunk_seconds=0.0)]
        chunk_seconds = SLACK * Percentiles.of(alone).p50 * CHUNK_TOKENS / tokens
        overlapped = _rounds(link, side, ROUNDS, chunk_seconds)
        link.ask(wire.CloseDecode(), wire.Done)
    return Overlap(
        protocol=protocol,
        tokens=tokens,
        num_bytes=overlapped[-1][1].num_bytes,
        checksums=overlapped[-1][1].checksums,
        chunk_seconds=chunk_seconds,
        alone=tuple(alone),
        waits=tuple(answer.ready_at - computed_at for computed_at, answer in overlapped),
        admissions=tuple(answer.admission_seconds for _, answer in overlapped),
    )


def _rounds(
    link: wire.Link, side: PrefillSide, rounds: int, chunk_seconds: float
) -> Sequence[tuple[float, wire.PromptAdmitted]]:
    """When each prompt was computed (time.monotonic), and what the target says of it."""
    side.model.seconds_per_layer = chunk_seconds / LAYERS
    answers = []
    for _ in range(rounds):
        answer = link.ask(wire.AdmitOne(), wire.PromptAdmitted)
        answers.append((side.model.computed_at, answer))
    return answers
