"""Scripted nodes of gateways: one that only registers, and a decode node that answers."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

import numpy as np

from benchmarks.scripted_node import ScriptedNode
from control.messages import (
    Accepted,
    Cancel,
    Ended,
    Generate,
    HeartbeatAck,
    Message,
    Output,
    Outputs,
    Peer,
    Refused,
    Rejected,
    Resend,
    Token,
)
from control.prompt_logprobs import PromptLogprobs
from tests.identity import IDENTITY

CONTEXT = 512


def wait_until(condition: Callable[[], object], timeout: float = 10.0) -> None:
    until = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < until, "the condition did not come true"
        time.sleep(0.005)


class FakeNode(ScriptedNode):
    """A scripted node that keeps what gateways tell it."""

    def __init__(self, gateway_address: str, role: Literal["prefill", "decode"], **options: Any) -> None:
        self.refusals: list[str] = []
        self.prefill_nodes: tuple[Peer, ...] = ()
        super().__init__(gateway_address, role, **{"identity": IDENTITY, "max_request_tokens": CONTEXT, **options})

    @property
    def me(self) -> Peer:
        return self.control.me

    @property
    def port(self) -> int:
        return int(self.me.address.rpartition(":")[2])

    def start(self) -> Self:
        self.run(tick_s=0.02)
        wait_until(lambda: self.membership.is_member or self.refusals)
        return self

    def deliver(self, sender: Peer, message: Message) -> None:
        match message:
            case Refused(reason=reason):
                self.refusals.append(reason)
                return
            case HeartbeatAck(prefill_nodes=prefill_nodes):
                self.prefill_nodes = prefill_nodes
        super().deliver(sender, message)


class FakeDecodeNode(FakeNode):
    """Answers with the prompt over and over, one token per message, after the tokens of another node if there are some.

    hold_after: how many tokens to send before waiting for a Cancel. reject: refuse with this code. chunks: send these
    token ids, one list per message, instead of the prompt.
    """

    def __init__(self, gateway_address: str, **options: object) -> None:
        self.reset()
        super().__init__(gateway_address, "decode", **options)  # type: ignore[arg-type]

    def reset(self) -> None:
        """Forget the script and what was seen."""
        self.hold_after: int | None = None
        self.reject: Literal["queue_full", "too_long", "draining"] | None = None
        self.retry_after = 7.0
        """Seconds, of refusals."""
        self.invalid: str | None = None
        """Why no node can carry requests out."""
        self.chunks: Sequence[Sequence[int]] | None = None
        self.lost: frozenset[int] = frozenset()
        """Numbers of the messages with tokens that are lost on the way; the other ones arrive."""
        self.lost_prompt = 0
        """How many pieces of the prompt's log probabilities are lost on the way."""
        self.deaf_to_resend = 0
        """How many times it does not hear that it is asked for tokens again."""
        self.resent: list[Resend] = []
        """What it was asked for again."""
        self._answers: dict[str, list[Output]] = {}
        self.cached_tokens: Sequence[int] = (0,)
        """Tokens of the prompt that were not computed, of one request after the other, round and round."""
        self.extra_outputs: list[Output] = []
        """Sent after the tokens; their request ids are replaced."""
        self.asked: list[Generate] = []
        """Messages that asked it for requests, as they came."""
        self.generated: list[Generate] = []
        """The requests, each once."""
        self.cancelled: list[str] = []
        self.ended: list[str] = []
        """Requests of which the gateway has said that it knows of their end."""

    def deliver(self, sender: Peer, message: Message) -> None:
        self._gateway = sender
        match message:
            case Generate():
                self.asked.append(message)
                seen = {request.request_id for request in self.generated}
                for request in message.each():
                    if request.request_id not in seen:
                        self.generated.append(request)
                        self._generate(request)
            case Cancel():
                self.cancelled.append(message.request_id)
                self.send(Output(request_id=message.request_id, start=0, finish_reason="abort"))
            case Ended():
                self.ended.append(message.request_id)
            case Resend():
                self.resent.append(message)
                if len(self.resent) > self.deaf_to_resend:
                    self._resend(message)
            case _:
                super().deliver(sender, message)

    def send(self, *outputs: Output) -> None:
        """To the gateway that was heard last."""
        self.control.send(self._gateway, Outputs.of(outputs))

    def _generate(self, request: Generate) -> None:
        if self.reject is not None:
            rejected = Rejected(
                request_id=request.request_id, code=self.reject, reason="scripted refusal", retry_after=self.retry_after
            )
            self.control.send(self._gateway, rejected)
            return
        self.control.send(self._gateway, Accepted(request_id=request.request_id))
        if self.invalid is not None:
            ended = Output(request_id=request.request_id, start=0, finish_reason="invalid", error=self.invalid)
            self.send(ended)
            return
        start, resumed_at = 0, len(request.generated)
        answer = self._answers[request.request_id] = []
        for number, piece in enumerate(self._prompt_logprobs(request)):
            output = Output(request_id=request.request_id, start=0, prompt_logprobs=piece)
            answer.append(output)
            if number >= self.lost_prompt:
                self.send(output)
        for number, (ids, finish) in enumerate(self._script(request)):
            if start + len(ids) <= resumed_at:
                start += len(ids)
                continue
            tokens = tuple(self._token(token_id, request) for token_id in ids)
            output = Output(request_id=request.request_id, start=start, tokens=tokens, finish_reason=finish)
            if not start:
                cached = self.cached_tokens[(len(self.generated) - 1) % len(self.cached_tokens)]
                output = output._replace(cached_tokens=cached)
            answer.append(output)
            if number not in self.lost:
                self.send(output)
            start += len(tokens)
        for output in self.extra_outputs:
            self.send(output._replace(request_id=request.request_id))

    def _resend(self, asked: Resend) -> None:
        outputs = self._answers[asked.request_id]
        self.send(*(output for output in outputs if output.start >= asked.start))

    def _script(self, request: Generate) -> list[tuple[Sequence[int], Literal["stop", "length"] | None]]:
        prompt = request.prompt_ids
        chunks = self.chunks or [[prompt[i % len(prompt)]] for i in range(request.max_new_tokens)]
        script: list[tuple[Sequence[int], Literal["stop", "length"] | None]] = []
        for index, ids in enumerate(chunks):
            if self.hold_after is not None and index == self.hold_after:
                return script
            if ids and ids[-1] in request.stop_token_ids:
                return [*script, (ids, "stop")]
            last = index == len(chunks) - 1 and self.hold_after is None and not self.extra_outputs
            script.append((ids, "length" if last else None))
        return script

    @staticmethod
    def _prompt_logprobs(request: Generate) -> list[PromptLogprobs]:
        """Of position p: -p, rank p, and the alternatives token p + 0, p + 1 ... with -p - 0.5, -p - 1.5 ..."""
        pieces = []
        for start in range(1, len(request.prompt_ids), 2) if request.prompt_logprobs is not None else ():
            stop = min(start + 2, len(request.prompt_ids))
            columns = range(1 + (request.prompt_logprobs or 0))
            ints = [[p + max(0, i - 1) for i in columns] for p in range(start, stop)]
            floats = [[-p - (i - 0.5 if i else 0.0) for i in columns] for p in range(start, stop)]
            pieces.append(PromptLogprobs.of(start, np.array(ints, np.int32), np.array(floats, np.float32)))
        return pieces

    @staticmethod
    def _token(token_id: int, request: Generate) -> Token:
        alternatives = request.sampling.top_logprobs
        if alternatives is None:
            return Token(token_id=token_id)
        top = tuple(((token_id + i) % 256, -0.5 - i) for i in range(alternatives))
        return Token(token_id=token_id, logprob=-0.5, top_logprobs=top)
