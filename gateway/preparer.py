"""What is to be generated for a request: its prompts as tokens, checked lengths, grammar, and how text is made."""

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from base.block_hashes import BlockHasher
from base.errors import StartupError
from base.tracing import NO_SPAN, TraceSpan
from control.grammar import Grammar, Lark
from control.messages import DraftCounts, Generate
from gateway.config import GatewayConfig
from gateway.detokenizer import TextOptions
from gateway.errors import ApiError, shown, wrong
from gateway.formats.conversation import FormatError
from gateway.formats.families import ChatFormat, ChatReading, choose_format
from gateway.generation import TokenizedRequest
from gateway.registry import Capacity
from gateway.requests.chat import ChatCompletionRequest, ConvertedRequest
from gateway.requests.completions import CompletionRequest, Prompt
from gateway.tokenizer import CheckpointTokenizer

MAX_SETTINGS_BYTES = 8 << 20
"""Of several prompts, what travels with each of them besides its tokens, as JSON: all together."""

ApiRequest = CompletionRequest | ChatCompletionRequest
GenerationBody = ApiRequest | ConvertedRequest


@dataclass(frozen=True)
class PreparedRequest:
    """What decode nodes are to generate for a request.

    body: of the endpoint, of which `request` was made. tokenized: one for each answer to be generated, those of the
    first prompt first; its id is `request_id`, or that and a number where there are several. text: how their text is
    made. reading: of a chat, how its answers are taken apart.
    """

    request: ApiRequest
    request_id: str
    tokenized: tuple[TokenizedRequest, ...]
    text: TextOptions
    body: GenerationBody
    reading: ChatReading | None = None

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once: so are they held, and sent."""
        return sum(len(each.prompt_ids) for each in self.tokenized[:: self.request.computed_choices])

    def first_choice(self, index: int) -> int:
        """The number of the first answer to the same prompt. index: of the answers that are given."""
        return index // self.request.choices * self.request.computed_choices

    def prompt_ids(self, index: int) -> tuple[int, ...]:
        """The prompt of an answer that is given."""
        return self.tokenized[self.first_choice(index)].prompt_ids

    @property
    def cached_tokens(self) -> int:
        """Those of `prompt_tokens` that were computed for none of the answers."""
        choices = self.request.computed_choices
        known = [each.outcome.cached_tokens for each in self.tokenized]
        return sum(min(known[first : first + choices]) for first in range(0, len(known), choices))

    @property
    def drafts(self) -> DraftCounts:
        """Of all answers."""
        counts = [each.outcome.drafts for each in self.tokenized]
        return sum(verified for verified, _ in counts), sum(right for _, right in counts)

    @property
    def generated_tokens(self) -> int:
        """Of all answers, those that are not given included."""
        return sum(each.outcome.tokens for each in self.tokenized)

    @property
    def shares_prompt_logprobs(self) -> bool:
        """Whether the first choice of each prompt has the log probabilities of its tokens computed for all of them."""
        first = self.tokenized[0]
        return bool(first.generate.group) and first.generate.prompt_logprobs is not None


@dataclass(frozen=True)
class Arrival:
    """What else matters of a request. time, deadline: time.monotonic. salt_key: the API key with its own prefixes."""

    time: float
    deadline: float
    capacity: Capacity
    salt_key: bytes | None
    span: TraceSpan = NO_SPAN


class Preparer:
    """Prepares parsed requests. Any thread may call it."""

    def __init__(
        self, tokenizer: CheckpointTokenizer, chat_format: ChatFormat | None, block_hasher: BlockHasher | None
    ) -> None:
        """chat_format: None if the checkpoint has none. block_hasher: None if cached prefixes do not matter."""
        self.tokenizer = tokenizer
        self._chat_format = chat_format
        markers = frozenset() if chat_format is None else chat_format.markers
        self._skipped_in_chats = tokenizer.special_ids - {
            token_id for text, token_id in tokenizer.added_ids.items() if text in markers
        }
        """Special tokens that are no part of an answer's text; the parsers of chats look for the others."""
        self._block_hasher = block_hasher

    def prepared(self, body: GenerationBody, request: ApiRequest, id_prefix: str, arrival: Arrival) -> PreparedRequest:
        """What is to be generated for `request`, which `body` asks for. Raises ApiError if that cannot be done."""
        request_id = f"{id_prefix}{uuid.uuid4().hex}"
        sampling = request.sampling(self.tokenizer)
        prompts, reading = self._prompts(request, arrival.capacity)
        own_stops = () if request.ignore_eos else self.tokenizer.stop_token_ids
        self.tokenizer.check_ids(request.stop_token_ids or (), "stop_token_ids")
        stop_token_ids = (*own_stops, *(request.stop_token_ids or ()))
        field, grammar = _grammar(request, reading, self.tokenizer.added_ids)
        request.check_prompt_logprobs(sum(map(len, prompts)))
        prompt_logprobs = request.requested_prompt_logprobs()
        salt = _salt(request.cache_salt, arrival.salt_key)
        choices = request.computed_choices
        firsts = [
            TokenizedRequest(
                Generate(
                    request_id=request_id,
                    prompt_ids=tuple(prompt_ids),
                    max_new_tokens=request.max_new_tokens(len(prompt_ids), arrival.capacity),
                    sampling=sampling,
                    stop_token_ids=stop_token_ids,
                    priority=request.priority or 0,
                    grammar=grammar,
                    group=f"{request_id}-{number}" if choices > 1 else "",
                    prompt_logprobs=prompt_logprobs,
                    counts_drafts=bool(request.return_draft_counts),
                    cache_salt=salt,
                    traceparent=arrival.span.traceparent,
                ),
                streams=bool(request.stream),
                arrived=arrival.time,
                deadline=arrival.deadline,
                block_hashes=None if self._block_hasher is None else self._block_hasher(prompt_ids, salt),
                structure_field=None if field is None else body.names.get(field, field),
                span=arrival.span,
            )
            for number, prompt_ids in enumerate(prompts)
        ]
        _check_settings(firsts)
        text = self._text_options(request, reading, own_stops)
        return PreparedRequest(request, request_id, _choices(firsts, choices), text, body, reading)

    def _prompts(self, request: ApiRequest, capacity: Capacity) -> tuple[list[list[int]], ChatReading | None]:
        """The token ids of the prompts, and of a chat, how its answers are taken apart. Raises ApiError."""
        if isinstance(request, ChatCompletionRequest):
            token_ids, reading = self.chat_prompt(request)
            prompts = [token_ids]
        else:
            reading = None
            prompts = [self._prompt_ids(request, prompt, capacity) for prompt in request.prompt]
        prompts = [request.truncated(token_ids, capacity.context) for token_ids in prompts]
        if not all(prompts):
            raise ApiError(400, "the prompt has no tokens: expected at least one", param=request.prompt_field)
        return prompts, reading

    def chat_prompt(
        self, request: ChatCompletionRequest, special_tokens: bool = False
    ) -> tuple[list[int], ChatReading]:
        """A chat's token ids, and how its answers are read. special_tokens: put them in front. Raises ApiError."""
        if self._chat_format is None:
            raise ApiError(400, "this model has no chat template: use /v1/completions", param="messages")
        tools = request.usable_tools
        calls = request.call_rules()
        if tools and not (self._chat_format.knows_tools or calls.forced):
            reason = "this model's chat template has no place for them: only a call can be required (tool_choice)"
            raise wrong("tools", reason)
        try:
            prompt = self._chat_format.render(
                [message.rendered() for message in request.messages],
                tools,
                thinking=request.thinking,
                variables=request.template_variables(),
                end=request.prompt_end,
                may_reason=request.may_reason,
            )
        except FormatError as error:
            raise wrong("messages", str(error)) from error
        token_ids = self.tokenizer.encode(prompt.text, special_tokens=special_tokens)
        return token_ids, ChatReading(self._chat_format, calls, prompt.reasoning)

    def _prompt_ids(self, request: CompletionRequest, prompt: Prompt, capacity: Capacity) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, special_tokens=True)
        # Refuse one that is too long before looking at each id.
        request.max_new_tokens(len(request.truncated(prompt, capacity.context)), capacity)
        self.tokenizer.check_ids(prompt, "prompt")
        return prompt

    def _text_options(self, request: ApiRequest, reading: ChatReading | None, own_stops: Sequence[int]) -> TextOptions:
        stop_token_ids = (*own_stops, *(request.stop_token_ids or ()))
        skipped = self.tokenizer.special_ids if reading is None else self._skipped_in_chats
        if request.skip_special_tokens is False:
            skipped = frozenset()
        if not (request.include_stop_str_in_output or skipped.issuperset(stop_token_ids)):
            # Few requests have a set of their own: a shared one stays in the processor's cache.
            skipped |= frozenset(stop_token_ids)
        return TextOptions(
            stops=tuple(request.stop),
            includes_stop=bool(request.include_stop_str_in_output),
            min_tokens=request.min_tokens or 0,
            skipped=skipped,
            prompt_only=request.prompt_only,
            stop_token_ids=frozenset(request.stop_token_ids or ()).difference(own_stops),
        )


def _check_settings(firsts: Sequence[TokenizedRequest]) -> None:
    """Raises ApiError if settings that are sent with each prompt are too many bytes together."""
    if len(firsts) == 1:
        return
    size = len(firsts[0].generate.model_dump_json(exclude={"prompt_ids"}, exclude_defaults=True))
    if size * len(firsts) > MAX_SETTINGS_BYTES:
        raise wrong(
            "prompt",
            f"each of {len(firsts)} prompts takes {size} bytes of settings (allowed_token_ids, bad_words, "
            f"logit_bias, the structure of the answer); all together may take {MAX_SETTINGS_BYTES}. Send fewer prompts "
            "at a time.",
        )


def _choices(firsts: Sequence[TokenizedRequest], choices: int) -> tuple[TokenizedRequest, ...]:
    """All answers, each with its own id and seed. Of each prompt only the first has log probabilities computed."""
    if len(firsts) * choices == 1:
        return tuple(firsts)

    def choice_of(first: TokenizedRequest, number: int, choice: int) -> TokenizedRequest:
        shared = first.generate
        own = {
            "request_id": f"{shared.request_id}-{number * choices + choice}",
            "sampling": shared.sampling.model_copy(update={"seed": (shared.sampling.seed + choice) % 2**63}),
            "prompt_logprobs": None if choice else shared.prompt_logprobs,
        }
        return replace(first, generate=shared.model_copy(update=own))

    return tuple(choice_of(first, number, choice) for number, first in enumerate(firsts) for choice in range(choices))


def _grammar(
    request: ApiRequest, reading: ChatReading | None, added_ids: Mapping[str, int]
) -> tuple[str | None, Grammar | None]:
    """What the answers have to look like, after their reasoning, and the field that says so. Raises ApiError.

    added_ids: added tokens by text.
    """
    field, structure = request.structure() or (None, None)
    after = reading.format.end_of_reasoning if reading is not None and reading.reasoning else None
    if reading is not None:
        try:
            calls = reading.call_grammar(structure, added_ids)
        except FormatError as error:
            names = shown(", ".join(reading.calls.tools.names))
            raise wrong("tools", f"{error}: {names}") from error
        if calls is not None:
            field, structure = "tools", Lark(grammar=calls)
    return field, None if structure is None else Grammar(structure=structure, after=after)


def _salt(given: str | None, client_key: bytes | None) -> str:
    """The salt of a request for decode nodes. given: `cache_salt` of the body. client_key: None if all clients share.

    A digest, so that it tells nodes neither of the two, and that no body can name what another client's key makes.
    """
    if given is None and client_key is None:
        return ""
    salt = hashlib.sha256(b"hisparse-pd prefix cache")
    for part in (None if given is None else given.encode(), client_key):
        salt.update(b"-" if part is None else b"+" + len(part).to_bytes(8, "little") + part)
    return salt.hexdigest()


def chat_format_of(config: GatewayConfig, tokenizer: CheckpointTokenizer) -> ChatFormat | None:
    """How chats are written; None if the checkpoint knows none. Raises StartupError for a parser that does not fit."""
    try:
        return choose_format(
            tokenizer.model_type,
            template=tokenizer.chat_template,
            apply=tokenizer.apply_chat_template,
            call_parser=None if config.tool_call_parser == "auto" else config.tool_call_parser,
            parse_reasoning=config.reasoning_parser == "auto",
        )
    except ValueError as error:
        raise StartupError(f"--tool-call-parser {config.tool_call_parser}: {error}") from error
