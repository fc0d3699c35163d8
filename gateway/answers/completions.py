"""Answers of /v1/completions."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NotRequired, cast

from typing_extensions import TypedDict

from control.messages import Token
from control.prompt_logprobs import PromptLogprobTable
from gateway.answers.kept import KeptAnswer
from gateway.answers.openai import (
    TEXT,
    Choice,
    Head,
    OpenAIAnswer,
    PromptLogprobs,
    PromptTokenIds,
    Usage,
    prompt_tokens,
)
from gateway.answers.streamed import Column, Json
from gateway.attempt import Delta
from gateway.errors import wrong
from gateway.requests.completions import CompletionRequest

MAX_ECHO_CHARS = 8 << 20
"""Characters of prompts in all answers to one request."""


class CompletionLogprobs(TypedDict):
    """By token of the answer, and of the prompt in an echo, of which the first token has none. top_logprobs: by text.
    text_offset: where in the text the token begins."""

    tokens: list[str] | Column[str]
    token_logprobs: list[float | None] | Column[float | None]
    top_logprobs: list[dict[str, float | None] | None] | Column[dict[str, float | None] | None]
    text_offset: list[int] | Column[int]


class CompletionChoice(Choice):
    """One answer."""

    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids: NotRequired[PromptTokenIds]


class Completion(Head):
    """The answers to a completion request. Chunks of a stream have the same form."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionAnswer(OpenAIAnswer[CompletionChoice]):
    """With the prompt's text in front, if the request asks for an echo."""

    chunk_kind = "text_completion"
    # An echo is part of the first text, which is rendered by then.
    plain: ClassVar = {"text": TEXT}

    def __post_init__(self) -> None:
        super().__post_init__()
        request = self.prepared.request
        assert isinstance(request, CompletionRequest)
        self._request = request
        self._with_logprobs = request.logprobs is not None
        self._echoes: dict[int, str] = {}
        """By choice, the text of the prompt, until it has been rendered."""
        if request.echo:
            for number, prompt in enumerate(request.prompt):
                choices = range(number * request.choices, (number + 1) * request.choices)
                whole = request.truncate_prompt_tokens is None
                used = self.prepared.prompt_ids(choices[0])
                text = prompt if isinstance(prompt, str) and whole else self.tokenizer.decode(used)
                self._echoes |= dict.fromkeys(choices, text)
        if (echoed := sum(map(len, self._echoes.values()))) > MAX_ECHO_CHARS:
            repeated = f"the answers would repeat {echoed} characters of prompts; at most {MAX_ECHO_CHARS} are given"
            raise wrong("echo", repeated)
        self._echoed: dict[int, int] = {}
        """By choice, the length of the prompt's text once that has been rendered."""

    def whole(self) -> Completion:
        choices = self._whole_choices()
        if self._prompt_logprobs is not None:
            for choice in choices:
                choice["prompt_logprobs"] = Column(self._ranked_tokens(choice["index"], self._prompt_logprobs))
        if self._token_ids:
            for choice in choices:
                choice["prompt_token_ids"] = Column(self.prepared.prompt_ids(choice["index"]))
        return {**self._head, "object": "text_completion", "choices": choices, "usage": self._usage()}

    def _whole_choice(self, index: int, kept: KeptAnswer) -> CompletionChoice:
        return {
            "index": index,
            "logprobs": self._whole_logprobs(index, kept) if self._with_logprobs else None,
            "finish_reason": kept.finish_reason,
            "text": self._echoes.pop(index, "") + kept.text,
        }

    def _text(self, index: int, delta: Delta) -> Json:
        text = {"text": self._echoes.pop(index, "") + delta.text}
        if self._token_ids and delta.first:
            return {**text, "prompt_token_ids": self.prepared.prompt_ids(index)}
        return text

    def _of_tokens(self, tokens: Sequence[Token]) -> dict[str, list[Any]]:
        return {
            "tokens": [self._name(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                self._by_text(dict(token.top_logprobs) | {token.token_id: token.logprob}) for token in tokens
            ],
        }

    def _logprobs(self, index: int, delta: Delta) -> CompletionLogprobs:
        echo = self._echo_logprobs(index, delta.prompt)
        before = self._echoed.get(index, 0)
        own = {**self._of_tokens(delta.tokens), "text_offset": [before + offset for offset in delta.offsets]}
        return cast(CompletionLogprobs, {name: echo[name] + elements for name, elements in own.items()})

    def _whole_logprobs(self, index: int, kept: KeptAnswer) -> CompletionLogprobs:
        echo = {name: Column(values) for name, values in self._echo_logprobs(index, kept.prompt).items()}
        before, end = self._echoed.get(index, 0), len(kept.text)
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            echo[name].append(kept.columns[name])
        # The text ends before the stop string, but offsets count it.
        echo["text_offset"].extend(before + min(offset, end) for offset in kept.offsets)
        return cast(CompletionLogprobs, echo)

    def _echo_logprobs(self, index: int, table: PromptLogprobTable | None) -> dict[str, list[Any]]:
        """Those of the prompt's tokens, if an echo is still to be rendered. The first token has none."""
        if index not in self._echoes:
            return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        prompt_ids, text = self.prepared.prompt_ids(index), self._echoes[index]
        self._echoed[index] = len(text)
        assert table is not None, "an echo with log probabilities asks for those of the prompt"
        assert self._request.logprobs is not None
        tokens = list(prompt_tokens(prompt_ids, table, self._request.logprobs))
        top = [self._by_text({**dict(token.top), token.token_id: token.logprob}) for token in tokens]
        return {
            "tokens": [self._name(token_id) for token_id in prompt_ids],
            "token_logprobs": [None, *(token.logprob for token in tokens)],
            "top_logprobs": [None, *top],
            "text_offset": self._offsets(prompt_ids, text),
        }

    def _offsets(self, prompt_ids: Sequence[int], text: str) -> list[int]:
        """Where in the text of a prompt each of its tokens begins. A special token that it lacks takes no room."""
        special_ids = self.tokenizer.special_ids.intersection(prompt_ids)
        detokenizer = self.tokenizer.detokenizer({i for i in special_ids if self.tokenizer.piece(i) not in text})
        offsets, length = [], 0
        for token_id in prompt_ids:
            offsets.append(min(length, len(text)))
            length += len(detokenizer.push(token_id))
        return offsets

    def _by_text(self, by_id: Mapping[int, float | None]) -> dict[str, float | None]:
        by_text: dict[str, float | None] = {}
        for token_id, logprob in by_id.items():
            piece = self._name(token_id)
            # Several tokens may have the same text, such as parts of characters.
            by_text[f"token_id:{token_id}" if piece in by_text else piece] = logprob
        return by_text
