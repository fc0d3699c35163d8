"""Asks the service a question as a client does: over HTTP, in a conversation, with the answer streamed."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from benchmarks.passkey.question import Question

_ANSWER_TOKENS = 64
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Answer:
    """An answer and its times, in seconds on the client's clock. Tokens are counted by the service."""

    text: str
    prompt_tokens: int
    tokens: int
    first: float
    """From the question to the first text."""
    rest: float
    """From the first text to the last."""

    @property
    def between_tokens(self) -> float:
        return self.rest / max(1, self.tokens - 1)


def ask(base_url: str, model: str, question: Question, show: Callable[[str], None]) -> Answer:
    """Stream the answer, and give `show` each piece of text as it arrives. Raises httpx.HTTPError if there is none."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question.message}],
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    pieces: list[str] = []
    times: list[float] = []
    usage = {"prompt_tokens": 0, "completion_tokens": 0}
    asked = time.monotonic()
    url = f"{base_url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, timeout=_TIMEOUT_S, trust_env=False) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise httpx.HTTPError(event["error"]["message"])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    times.append(time.monotonic())
                    pieces.append(piece)
                    show(piece)
    if not times:
        raise httpx.HTTPError("the answer is empty")
    return Answer(
        "".join(pieces), usage["prompt_tokens"], usage["completion_tokens"], times[0] - asked, times[-1] - times[0]
    )
