"""Between gateways and decode nodes: requests."""

from array import array
from collections.abc import Iterator
from functools import cached_property
from typing import Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, Field, model_validator

from base.wire import Identifier, UInt, WireModel
from control.grammar import Grammar
from control.messages.common import (
    DECODE,
    GATEWAY,
    CacheSalt,
    ListedPeers,
    LongestPrompts,
    Message,
    RanksOfNodes,
    TokenId,
    TokenIds,
    TraceParent,
)
from control.prompt_logprobs import Alternatives

MAX_BIASES = 1024
"""Token ids of one request whose logits are changed one by one."""
MAX_ALLOWED = 2**18
"""Token ids in `Sampling.allowed_token_ids`; vocabularies are smaller."""
MAX_BAD_WORD_TOKENS = 4096
"""Tokens of all bad words of one request together."""
Bias = Annotated[float, Field(ge=-100, le=100)]
MAX_STOP_IDS = 1024
MAX_CHOICES = 128
"""Answers of one request of a client, over all of its prompts."""
Penalty = Annotated[float, Field(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100)]
"""Logits are divided and multiplied by it. A finite logit below 3e36 stays finite in float32; models have logits below
1e5. A smaller penalty overflows, and one below 1e-45 is 0 in float32."""


def _few_tokens(words: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    if (count := sum(map(len, words))) > MAX_BAD_WORD_TOKENS:
        raise ValueError(f"expected at most {MAX_BAD_WORD_TOKENS} tokens in all words together, found {count}")
    return words


class Sampling(WireModel):
    """How the next token is drawn.

    The bounds keep changed logits finite, and the work of one request in a decode step small. Gateways use them, too.
    """

    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: UInt = 0
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    logit_bias: Annotated[tuple[tuple[TokenId, Bias], ...], Field(max_length=MAX_BIASES)] = ()
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[tuple[Annotated[TokenIds, Field(min_length=1)], ...], AfterValidator(_few_tokens)] = ()
    min_tokens: UInt = 0


class FurtherChoice(WireModel):
    """A request that differs from the one of its message in these fields alone."""

    request_id: Identifier
    seed: UInt
    generated: TokenIds = ()


class Generate(Message, sent_by=GATEWAY):
    """Gateway to decode node: take these requests. Repeated until Accepted, Rejected or Outputs answers each.

    generated: tokens that another node has generated, fewer than `max_new_tokens`, which counts them. New ones follow.
    """

    request_id: Identifier
    prompt_ids: Annotated[TokenIds, Field(min_length=1)]
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    generated: TokenIds = ()
    sampling: Sampling = Sampling()
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOP_IDS)] = ()
    priority: Annotated[int, Field(ge=-(2**63), lt=2**63)] = 0
    grammar: Grammar | None = None
    cache_salt: CacheSalt = ""
    group: Annotated[str, Field(max_length=128)] = ""
    prompt_logprobs: Alternatives | None = None
    counts_drafts: bool = False
    prefill_nodes: ListedPeers = ()
    longest_prompts: LongestPrompts = Field(default_factory=dict)
    prefill_ranks: RanksOfNodes = Field(default_factory=dict)
    traceparent: TraceParent = ""
    further: Annotated[tuple[FurtherChoice, ...], Field(max_length=MAX_CHOICES - 1)] = ()

    @model_validator(mode="after")
    def _check_generated(self) -> Self:
        most = max(len(self.generated), *(len(choice.generated) for choice in self.further), 0)
        if most >= self.max_new_tokens:
            raise ValueError(f"generated: expected fewer than max_new_tokens {self.max_new_tokens}, found {most}")
        return self

    @cached_property
    def packed_prompt(self) -> "array[int]":
        """The prompt's token ids, shared by copies that are made afterwards. No NumPy array: messages are compared."""
        return array("i", self.prompt_ids)

    @cached_property
    def largest_named_id(self) -> int:
        """The largest token id that the settings name, or 0. Shared as `packed_prompt` is."""
        sampling = self.sampling
        named = (self.stop_token_ids, [token for token, _ in sampling.logit_bias], sampling.allowed_token_ids or ())
        return max(max(ids, default=0) for ids in (*named, *sampling.bad_words))

    @property
    def prompt(self) -> npt.NDArray[np.int32]:
        """The prompt's token ids: int32 [prompt_tokens], in the memory of `packed_prompt`."""
        return np.frombuffer(self.packed_prompt, dtype=np.int32)

    def each(self) -> Iterator["Generate"]:
        """One message for each request, with the prompt and the settings shared. The first has `prompt_logprobs`."""
        _ = self.packed_prompt, self.largest_named_id
        yield self.model_copy(update={"further": ()})
        for choice in self.further:
            sampling = self.sampling.model_copy(update={"seed": choice.seed})
            own = {"request_id": choice.request_id, "sampling": sampling, "generated": choice.generated}
            yield self.model_copy(update={**own, "prompt_logprobs": None, "further": ()})


class Accepted(Message, sent_by=DECODE):
    """Decode node to gateway: it has the request."""

    request_id: Identifier


class Rejected(Message, sent_by=DECODE):
    """Decode node to gateway: it has not taken the request. retry_after: seconds."""

    request_id: Identifier
    code: Literal["queue_full", "too_long", "draining"]
    reason: str
    retry_after: Annotated[float, Field(ge=0)] = 0.0


class Ended(Message, sent_by=GATEWAY):
    """Gateway to decode node: the Output with a finish reason has arrived, and all tokens before it."""

    request_id: Identifier


class Resend(Message, sent_by=GATEWAY):
    """Gateway to decode node: send the tokens from index `start` on again. Repeated until the gap is closed.

    With `start` 0 the log probabilities of the prompt come again, too.
    """

    request_id: Identifier
    start: UInt


class Cancel(Message, sent_by=GATEWAY):
    """Gateway to decode node: the client left. Repeated until an Output with a finish reason answers it."""

    request_id: Identifier
