"""Which requests a decode node accepts."""

from dataclasses import dataclass

from control.messages import Generate


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
        if max(generate.prompt_ids) >= self.vocab_size:
            return f"token id {max(generate.prompt_ids)} is outside the vocabulary of {self.vocab_size}"
        return None
