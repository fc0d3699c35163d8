"""The decode node of the fuzzer: it does what it is asked, and says what no gateway may ask for."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, Literal

import numpy as np

from control.messages import Generate, Message, Output, Peer
from control.prompt_logprobs import PromptLogprobs
from tests.fuzz.bodies import Case
from tests.fuzz.honest import CHOICES
from tests.gateway.nodes import FakeDecodeNode
from tests.gateway.world import EOS, VOCAB

HONEST = b"honest"
"""The prompt of the client beside the hostile one."""
_CHUNK = 16
_STEP = 21 * CHOICES
"""Tokens and alternatives of one message: a token of each of the most choices. One without alternatives counts as 8."""
MOST_TOKENS = 1 << 14
"""Of all answers to a case. No node is so fast that more come in a moment, and a gateway's queue overflows."""
_PIECE = 512
_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 2**31),
    "min_p": (0, 1),
    "seed": (0, 2**63),
    "top_logprobs": (0, 20),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "min_tokens": (0, 2**31),
}
"""As docs/operations/secure.md has them, and not as the code does: one that is forgotten there shows."""


class ScriptedModel(FakeDecodeNode):
    """Writes what the case says, also as long answers with log probabilities; an honest prompt it repeats."""

    case: Case
    _gathered: list[Output] | None = None

    def plays(self, case: Case) -> None:
        """From now on, of requests that have yet to come."""
        self.reset()
        self.case, self._choices = case, 1

    def deliver(self, sender: Peer, message: Message) -> None:
        if isinstance(message, Generate) and not _is_honest(message):
            self._choices = 1 + len(message.further)
        self._gathered = []
        super().deliver(sender, message)
        outputs, self._gathered = self._gathered, None
        step: list[Output] = []
        room = _STEP
        for output in outputs:
            room -= sum(max(8, 1 + len(token.top_logprobs)) for token in output.tokens)
            if room < 0 or len(step) == CHOICES:
                super().send(*step)
                step, room = [], _STEP
            step.append(output)
        if step:
            super().send(*step)

    def send(self, *outputs: Output) -> None:
        """As a node does: what many requests have is one message, and of one step."""
        if self._gathered is None:
            super().send(*outputs)
        else:
            self._gathered += outputs

    @property
    def asked_by_case(self) -> list[Generate]:
        """Each message once, however often it was repeated."""
        return list({message.request_id: message for message in self.asked if not _is_honest(message)}.values())

    def _script(self, request: Generate) -> list[tuple[Sequence[int], Literal["stop", "length"] | None]]:
        if _is_honest(request):
            return super()._script(request)
        ids = [*self.case.says, EOS]
        if request.sampling.top_logprobs is not None:
            ids = list(islice(cycle(self.case.says), max(1, self.case.tokens // self._choices)))
        ids = ids[: min(request.max_new_tokens, max(1, MOST_TOKENS // self._choices))]
        last = "stop" if ids[-1] in request.stop_token_ids else "length"
        chunks = [ids[start : start + _CHUNK] for start in range(0, len(ids), _CHUNK)]
        return [*((chunk, None) for chunk in chunks[:-1]), (chunks[-1], last)]  # type: ignore[list-item]

    @staticmethod
    def _prompt_logprobs(request: Generate) -> list[PromptLogprobs]:
        if request.prompt_logprobs is None:
            return []
        length, columns = len(request.prompt_ids), 1 + request.prompt_logprobs
        ints = np.ones((length, columns), np.int32)
        floats = np.full((length, columns), -0.5, np.float32)
        starts = range(1, length, _PIECE)
        return [PromptLogprobs.of(at, ints[at : at + _PIECE], floats[at : at + _PIECE]) for at in starts]


def _is_honest(message: Generate) -> bool:
    return bytes(id % 256 for id in message.prompt_ids[: len(HONEST)]) == HONEST  # noqa: A001


def beyond_bounds(message: Generate) -> list[str]:
    """What a decode node should never be asked for."""
    sampling: dict[str, Any] = message.sampling.model_dump()
    found = [
        f"{name}={sampling[name]}"
        for name, (least, most) in _BOUNDS.items()
        if sampling[name] is not None and not least <= sampling[name] <= most
    ]
    biases, allowed = dict(message.sampling.logit_bias), message.sampling.allowed_token_ids or ()
    counts = {
        "biases": (len(message.sampling.logit_bias), 1024),
        "biased ids": (max(biases, default=0), VOCAB - 1),
        "a bias": (max(map(abs, biases.values()), default=0), 100),
        "allowed ids": (len(allowed), VOCAB),
        "an allowed id": (max(allowed, default=0), VOCAB - 1),
        "tokens of bad words": (sum(map(len, message.sampling.bad_words)), 4096),
        "ids that stop": (len(message.stop_token_ids), 17),
        "a prompt's id": (max(message.prompt_ids), VOCAB - 1),
        "choices": (1 + len(message.further), CHOICES),
        "a grammar": (0 if message.grammar is None else len(message.grammar.model_dump_json()), 2 << 20),
        "priority": (abs(message.priority), 1000),
    }
    return found + [f"{what}: {count}, at most {most}" for what, (count, most) in counts.items() if count > most]
