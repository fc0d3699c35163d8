"""Which requests a decode node accepts."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from control.messages import Generate, Sampling
from control.prompt_logprobs import too_many


@dataclass(frozen=True)
class Limits:
    """host_slots: of the whole host pool. max_waiting: requests in state WAITING; more are rejected."""

    context_length: int
    vocab_size: int
    host_slots: int
    max_running: int
    max_waiting: int
    prefill_retries: int

    def refusal(self, generate: Generate) -> str | None:
        """Why the request could never run here, naming both values, or None."""
        prompt, new = len(generate.prompt_ids), generate.max_new_tokens
        if prompt + new > self.context_length:
            return f"{prompt} prompt tokens and max_tokens {new} exceed the context of {self.context_length} tokens"
        if prompt + new - 1 > self.host_slots:
            return f"{prompt + new - 1} tokens of KV exceed the host pool of {self.host_slots}"
        largest = int(generate.prompt.max())
        for token_ids in (generate.stop_token_ids, *_named_tokens(generate.sampling)):
            largest = max(largest, *token_ids, 0)
        if largest >= self.vocab_size:
            return f"token id {largest} is outside the vocabulary of {self.vocab_size}"
        return None if generate.prompt_logprobs is None else too_many(prompt, generate.prompt_logprobs)


def _named_tokens(sampling: Sampling) -> Iterator[Iterable[int]]:
    """The ids that settings name: tables on the device have no room for others."""
    yield (token_id for token_id, _ in sampling.logit_bias)
    yield sampling.allowed_token_ids or ()
    yield from sampling.bad_words
