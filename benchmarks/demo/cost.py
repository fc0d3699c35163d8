"""What an answer cost the nodes, by their metrics before and after it, and the table of all answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from benchmarks.demo.conversation import Answer
from benchmarks.metric_pages import Metrics
from benchmarks.tables import table


@dataclass(frozen=True)
class Cost:
    """hits, misses: selected items that were in the hot buffer, or not. fetched, sent: bytes. seconds: of sending.
    tokens: generated. accepted: of these, tokens that were drafted, so that they took no step of their own."""

    hits: float
    misses: float
    fetched: float
    sent: float
    writes: float
    seconds: float
    tokens: float
    accepted: float

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.tokens - self.accepted)

    @classmethod
    def between(cls, before: Metrics, after: Metrics) -> "Cost":
        swap_in = ("swap_in_hits_total", "swap_in_misses_total", "swap_in_bytes_total")
        transfer = ("transfer_bytes_total", "transfer_descriptors_total", "transfer_seconds_sum")
        tokens = ("generated_tokens_total", "spec_decode_num_accepted_tokens_total")
        return cls(*(after[name] - before[name] for name in (*swap_in, *transfer, *tokens)))


def cost_table(answers: Sequence[Answer], costs: Sequence[Cost], hot_buffer: int) -> Table:
    """A column for each answer. hot_buffer: slots of a request."""
    shown = table("", *(f"question {number}" for number in range(1, len(answers) + 1)), words=("",))

    shown.add_row("context", *(f"{answer.prompt_tokens + answer.tokens} tokens" for answer in answers))
    shown.add_row("hot buffer", *(f"{hot_buffer} slots" for _ in answers))
    shown.add_row(
        "of the context", *(f"{hot_buffer / (answer.prompt_tokens + answer.tokens):.1%}" for answer in answers)
    )
    shown.add_row("hit rate", *(f"{cost.hits / max(1, cost.hits + cost.misses):.1%}" for cost in costs))
    shown.add_row("tokens per step", *(f"{cost.tokens_per_step:.2f}" for cost in costs))
    shown.add_row("fetched from host", *(f"{cost.fetched / 1e6:.2f} MB" for cost in costs))
    shown.add_row("time to first token", *(f"{answer.first:.2f} s" for answer in answers))
    shown.add_row("time between tokens", *(f"{answer.between_tokens * 1e3:.1f} ms" for answer in answers))
    shown.add_row("KV sent", *(f"{cost.sent / 1e6:.1f} MB, {cost.writes:.0f} writes" for cost in costs))
    shown.add_row("transfer rate", *(f"{cost.sent / max(cost.seconds, 1e-9) / 1e9:.2f} GB/s" for cost in costs))
    return shown
