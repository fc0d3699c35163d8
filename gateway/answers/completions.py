"""Answers of /v1/completions."""

from collections.abc import Mapping, Sequence

from control.messages import Token
from gateway.answers.answer import Answer
from gateway.answers.prompt import offsets, prompt_tokens
from gateway.answers.streamed import Json
from gateway.choice import Delta
from gateway.errors import ApiError
from gateway.prepared import Prepared
from gateway.requests.completions import CompletionRequest
from gateway.tokenizer import CheckpointTokenizer

MAX_ECHO_CHARS = 8 << 20
"""Characters of prompts in all answers to one request."""


class CompletionAnswer(Answer):
    """With the prompt's text in front, if the request asks for an echo."""

    kind = chunk_kind = "text_completion"

    def __init__(self, prepared: Prepared, model: str, tokenizer: CheckpointTokenizer) -> None:
        super().__init__(prepared, model, tokenizer)
        assert isinstance(prepared.request, CompletionRequest)
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
        echo = self._echoes.pop(index, "")
        rendered: Json = {"text": echo + delta.text}
        if whole and self._prompt_logprobs is not None:
            rendered["prompt_logprobs"] = self._by_position(index, delta, self._prompt_logprobs)
        return rendered

    def _plain(self, text: str) -> Json:
        return {"text": text}

    def _stays_plain(self, index: int) -> bool:
        """An echo is part of the first text, which has been rendered."""
        return True

    def _logprobs(self, index: int, delta: Delta) -> Json | None:
        asked = self._alternatives_asked
        if asked is None:
            return None
        # An echo is still there where the text was not rendered yet: these are asked for first.
        echo = self._echo_logprobs(index, delta, asked) if index in self._echoes else _no_logprobs()
        before = self._echoed.get(index, 0)
        return {
            "tokens": echo["tokens"] + [self._tokenizer.piece(token.token_id) for token in delta.tokens],
            "token_logprobs": echo["token_logprobs"] + [token.logprob for token in delta.tokens],
            "top_logprobs": echo["top_logprobs"] + [self._alternatives(token) for token in delta.tokens],
            "text_offset": echo["text_offset"] + [before + offset for offset in delta.offsets],
        }

    def _echo_logprobs(self, index: int, delta: Delta, alternatives: int) -> Json:
        """Those of the prompt's tokens. Nothing says how likely the first one is."""
        prompt_ids, text = self._prepared.prompt_ids(index), self._echoes[index]
        self._echoed[index] = len(text)
        assert delta.prompt is not None, "an echo with log probabilities asks for those of the prompt"
        tokens = list(prompt_tokens(prompt_ids, delta.prompt, alternatives))
        top = [self._by_text({**dict(token.top), token.token_id: token.logprob}) for token in tokens]
        return {
            "tokens": [self._tokenizer.piece(token_id) for token_id in prompt_ids],
            "token_logprobs": [None, *(token.logprob for token in tokens)],
            "top_logprobs": [None, *top],
            "text_offset": offsets(prompt_ids, text, self._tokenizer),
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


def _no_logprobs() -> Json:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def best(answers: Sequence[Sequence[Delta]], count: int) -> tuple[list[Sequence[Delta]], list[Sequence[Delta]]]:
    """The `count` answers whose tokens are the likeliest on average, the best first, and the others."""

    def average(deltas: Sequence[Delta]) -> float:
        logprobs = [token.logprob or 0.0 for delta in deltas for token in delta.tokens]
        return sum(logprobs) / max(1, len(logprobs))

    ranked = sorted(answers, key=average, reverse=True)
    return ranked[:count], ranked[count:]
