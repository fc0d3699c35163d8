"""A request that was read: what decode nodes are to generate for it."""

from dataclasses import dataclass, field

from gateway.attempt import TokenizedRequest
from gateway.choice import TextOptions
from gateway.formats import CallParser, ChatFormat, ToolSet
from gateway.requests.chat import ChatCompletionRequest
from gateway.requests.completions import CompletionRequest
from gateway.requests.conversion import ConvertedRequest

ApiRequest = CompletionRequest | ChatCompletionRequest


@dataclass(frozen=True)
class ChatReading:
    """How the answers of a chat are taken apart. tools: those that may be called. reasoning: they begin with it."""

    format: ChatFormat
    tools: ToolSet
    reasoning: bool

    def parser(self, whole: bool) -> CallParser:
        """A parser of one answer. whole: the answer is complete, and so are its calls, or they are text."""
        return self.format.parser(self.tools, reasoning=self.reasoning, whole_calls=whole)


@dataclass(frozen=True)
class Prepared:
    """branches: one for each answer to be generated, those of the first prompt first; with `request_id` itself, or with
    a number behind it where there are several. text: how their text is made. reading: of a chat, how that is taken
    apart. source: the body that `request` was made of, where the endpoint has another form."""

    request: ApiRequest
    request_id: str
    branches: tuple[TokenizedRequest, ...]
    text: TextOptions
    reading: ChatReading | None = None
    source: ConvertedRequest | None = None
    cached: dict[int, int] = field(default_factory=dict)
    """By number of the branch, tokens of its prompt that were not computed for it, as soon as a node has said so."""

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once: so are they held, and sent."""
        return sum(len(branch.prompt_ids) for branch in self.branches[:: self.request.computed_choices])

    def prompt_ids(self, index: int) -> tuple[int, ...]:
        """The prompt of an answer that is given."""
        return self.branches[index // self.request.choices * self.request.computed_choices].prompt_ids

    @property
    def cached_tokens(self) -> int:
        """Those of `prompt_tokens` that were computed for none of the answers."""
        choices = self.request.computed_choices
        known = [self.cached.get(number, 0) for number in range(len(self.branches))]
        return sum(min(known[first : first + choices]) for first in range(0, len(known), choices))

    @property
    def shares_prompt_logprobs(self) -> bool:
        """Whether the first choice of each prompt has the log probabilities of its tokens computed for all of them."""
        first = self.branches[0]
        return bool(first.generate.group) and first.generate.prompt_logprobs is not None
