"""Answers of /v1/completions."""

from collections.abc import Mapping, Sequence

from control.messages import Token
from control.prompt_logprobs import PromptLogprobTable
from gateway.answers.answer import Answer
from gateway.answers.kept import Column, KeptAnswer
from gateway.answers.prompt import offsets, prompt_tokens
from gateway.answers.streamed import Json
from gateway.choice import Delta
from gateway.errors import ApiError
from gateway.held_answers import AnswerBytes
from gateway.prepared import Prepared
from gateway.requests.completions import CompletionRequest
from gateway.tokenizer import CheckpointTokenizer

MAX_ECHO_CHARS = 8 << 20
"""Characters of prompts in all answers to one request."""


class CompletionAnswer(Answer):
    """With the prompt's text in front, if the request asks for an echo."""

    kind = chunk_kind = "text_completion"

    def __init__(self, prepared: Prepared, model: str, tokenizer: CheckpointTokenizer, held: AnswerBytes) -> None:
        super().__init__(prepared, model, tokenizer, held)
        assert isinstance(prepared.request, CompletionRequest)
        self._best_of = prepared.request.computed_choices, prepared.request.choices
        """How many answers of each prompt are generated, and how many of them given."""
        self._alternatives_asked = prepared.request.logprobs
        self._with_logprobs = self._alternatives_asked is not None
        self._echoes: dict[int, str] = {}
        """By choice, the text of the prompt, until it has been rendered."""
        if prepared.request.echo:
            per_prompt = prepared.request.choices
            for number, prompt in enumerate(prepared.request.prompt):
                choices = range(number * per_prompt, (number + 1) * per_prompt)
                whole = prepared.request.truncate_prompt_tokens is None
                used = prepared.prompt_ids(choices[0])
                text = prompt if isinstance(prompt, str) and whole else tokenizer.decode(used)
                self._echoes |= dict.fromkeys(choices, text)
        if (echoed := sum(map(len, self._echoes.values()))) > MAX_ECHO_CHARS:
            message = (
                f"echo: the answers would repeat {echoed} characters of prompts; at most {MAX_ECHO_CHARS} are given"
            )
            raise ApiError(400, message, param="echo")
        self._echoed: dict[int, int] = {}
        """By choice, the length of the prompt's text once that has been rendered."""

    def _text(self, index: int, delta: Delta, whole: bool) -> Json:
        return {"text": self._echoes.pop(index, "") + delta.text}

    def _whole_choice(self, index: int, kept: KeptAnswer) -> Json:
        choice = super()._whole_choice(index, kept)
        if self._prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._by_position(index, kept, self._prompt_logprobs)
        return choice

    def _given(self, kept: Sequence[KeptAnswer]) -> Sequence[KeptAnswer]:
        """Of each prompt those whose tokens are the likeliest on average, the best first."""
        computed, given = self._best_of
        if computed == given:
            return kept
        prompts = [kept[start : start + computed] for start in range(0, len(kept), computed)]
        return [
            best
            for answers in prompts
            for best in sorted(answers, key=lambda answer: answer.average_logprob, reverse=True)[:given]
        ]

    def _plain(self, text: str) -> Json:
        return {"text": text}

    def _stays_plain(self, index: int) -> bool:
        """An echo is part of the first text, which has been rendered."""
        return True

    def _of_tokens(self, tokens: Sequence[Token]) -> dict[str, list[object]]:
        return {
            "tokens": [self._tokenizer.piece(token.token_id) for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [self._alternatives(token) for token in tokens],
        }

    def _logprobs(self, index: int, delta: Delta) -> Json:
        echo = self._echo_logprobs(index, delta.prompt)
        before = self._echoed.get(index, 0)
        own = self._of_tokens(delta.tokens) | {"text_offset": [before + offset for offset in delta.offsets]}
        return {name: echo.get(name, []) + values for name, values in own.items()}

    def _whole_logprobs(self, index: int, kept: KeptAnswer) -> Json:
        columns = {name: Column(values) for name, values in self._echo_logprobs(index, kept.prompt).items()}
        before, end = self._echoed.get(index, 0), len(kept.text)
        # The text ends before the stop string, but offsets count it.
        own_offsets = Column(before + min(offset, end) for offset in kept.offsets)
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            columns.setdefault(name, Column()).append_json(kept.columns[name].json)
        columns.setdefault("text_offset", Column()).append_json(own_offsets.json)
        return columns

    def _echo_logprobs(self, index: int, table: PromptLogprobTable | None) -> dict[str, list[object]]:
        """Those of the prompt's tokens, if an echo is still to be rendered: the text of a choice is rendered after its
        log probabilities. Nothing says how likely the first token is."""
        if index not in self._echoes:
            return {}
        prompt_ids, text = self._prepared.prompt_ids(index), self._echoes[index]
        self._echoed[index] = len(text)
        assert table is not None, "an echo with log probabilities asks for those of the prompt"
        assert self._alternatives_asked is not None
        tokens = list(prompt_tokens(prompt_ids, table, self._alternatives_asked))
        top = [self._by_text({**dict(token.top), token.token_id: token.logprob}) for token in tokens]
        return {
            "tokens": [self._tokenizer.piece(token_id) for token_id in prompt_ids],
            "token_logprobs": [None, *(token.logprob for token in tokens)],
            "top_logprobs": [None, *top],
            "text_offset": list(offsets(prompt_ids, text, self._tokenizer)),
        }

    def _alternatives(self, token: Token) -> dict[str, float | None]:
        """Log probabilities by text: the most probable tokens and the chosen one."""
        return self._by_text(dict(token.top_logprobs) | {token.token_id: token.logprob})

    def _by_text(self, by_id: Mapping[int, float | None]) -> dict[str, float | None]:
        by_text: dict[str, float | None] = {}
        for token_id, logprob in by_id.items():
            piece = self._tokenizer.piece(token_id)
            # Several tokens may have the same text, such as parts of characters.
            by_text[f"token_id:{token_id}" if piece in by_text else piece] = logprob
        return by_text
