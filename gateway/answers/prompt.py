"""The log probabilities of a prompt, as answers have them."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from control.prompt_logprobs import PromptLogprobTable
from gateway.answers.streamed import Json
from gateway.tokenizer import CheckpointTokenizer


class PromptToken(NamedTuple):
    """A token of a prompt behind the first. top: the likeliest tokens there, the likeliest first."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


def prompt_tokens(prompt_ids: Sequence[int], table: PromptLogprobTable, alternatives: int) -> Iterator[PromptToken]:
    """The tokens of a prompt behind the first. alternatives: how many to report, at most as many as the table has."""
    ints, floats = table.ints[:, : 1 + alternatives].tolist(), table.floats[:, : 1 + alternatives].tolist()
    for token_id, (rank, *ids), (logprob, *logprobs) in zip(prompt_ids[1:], ints, floats, strict=True):
        yield PromptToken(token_id, logprob, rank, list(zip(ids, logprobs, strict=True)))


def by_position(
    prompt_ids: Sequence[int], table: PromptLogprobTable, alternatives: int, tokenizer: CheckpointTokenizer
) -> Iterator[Json | None]:
    """vLLM's `prompt_logprobs`: for each position, by token id, the prompt's token and the likeliest ones."""
    yield None
    for token in prompt_tokens(prompt_ids, table, alternatives):
        entries = [(token.token_id, token.logprob, token.rank)]
        entries += [(i, logprob, rank) for rank, (i, logprob) in enumerate(token.top, 1) if i != token.token_id]
        yield {
            str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": tokenizer.piece(token_id)}
            for token_id, logprob, rank in entries
        }


def offsets(prompt_ids: Sequence[int], text: str, tokenizer: CheckpointTokenizer) -> list[int]:
    """Where in the text of a prompt each of its tokens begins. A special token that the text lacks, as one that the
    tokenizer puts in front, takes no room."""
    missing = {i for i in tokenizer.special_ids.intersection(prompt_ids) if tokenizer.piece(i) not in text}
    detokenizer = tokenizer.detokenizer(missing)
    found, length = [], 0
    for token_id in prompt_ids:
        found.append(min(length, len(text)))
        length += len(detokenizer.push(token_id))
    return found
