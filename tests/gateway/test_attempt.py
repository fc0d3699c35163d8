"""Which way deltas go: by the shortcut while the reader of the answer waits, else through it, and always in order."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from control.messages import FinishReason, Generate, Output, Peer, Token
from gateway.attempt import Attempt, Delta, DeltaSink, TokenizedRequest
from tests.gateway.fakes import held_answers

REQUEST = TokenizedRequest(
    Generate(request_id="r", prompt_ids=(1,), max_new_tokens=99), streams=True, arrived=0.0, deadline=9e9
)
NODE = Peer(role="decode", address="127.0.0.1:1", boot_id="boot")


def read(output: Output) -> Delta:
    """Token 0 ends the answer; token 1 breaks the reader."""
    ids = [token.token_id for token in output.tokens]
    if 1 in ids:
        raise ValueError("broken")
    return Delta(str(ids), output.tokens, (), "stop" if 0 in ids else output.finish_reason)


def attempt_with(take: Callable[[Delta], bool] | None = None) -> Attempt:
    return Attempt(REQUEST, NODE, 0.0, read, held_answers().account(), DeltaSink(take))


def say(attempt: Attempt, *ids: int, ends: FinishReason | None = None) -> None:
    """One message for each token."""
    for token_id in ids:
        token = Token(token_id=token_id)
        attempt.deliver(Output(request_id="r", start=attempt.received, tokens=(token,), finish_reason=ends), 0.0)


async def waiting(attempt: Attempt) -> "asyncio.Task[list[str]]":
    """The texts that `next` returns, once it waits for them."""

    async def texts() -> list[str]:
        return [delta.text for delta in await attempt.next()]

    task = asyncio.create_task(texts())
    await asyncio.sleep(0)
    return task


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(bounded())


def test_what_has_arrived_is_taken_at_once() -> None:
    async def test() -> None:
        attempt = attempt_with()
        say(attempt, 7, 8)
        assert await (await waiting(attempt)) == ["[7]", "[8]"]
        task = await waiting(attempt)
        say(attempt, 9)
        assert await task == ["[9]"]

    run(test)


def test_the_shortcut_is_for_deltas_behind_which_none_waits() -> None:
    async def test() -> None:
        short: list[str] = []

        def take(delta: Delta) -> bool:
            if delta.finish_reason is None:
                short.append(delta.text)
            return delta.finish_reason is None

        attempt = attempt_with(take)
        say(attempt, 7)
        assert await (await waiting(attempt)) == ["[7]"]
        task = await waiting(attempt)
        say(attempt, 8, 9, 0, 10)
        assert short == ["[8]", "[9]"]
        assert await task == ["[0]"], "nothing comes behind what ends the answer"
        say(attempt, 11)
        assert short == ["[8]", "[9]"]

    run(test)


def test_what_the_shortcut_refused_goes_first() -> None:
    async def test() -> None:
        slow = [True]
        short: list[str] = []

        def take(delta: Delta) -> bool:
            if not slow[0]:
                short.append(delta.text)
            return not slow[0]

        attempt = attempt_with(take)
        task = await waiting(attempt)
        say(attempt, 7)
        slow[0] = False
        say(attempt, 8)
        assert short == []
        assert await task == ["[7]", "[8]"]

    run(test)


def test_an_answer_that_cannot_be_read_fails_behind_what_could() -> None:
    async def test() -> None:
        attempt = attempt_with()
        say(attempt, 7, 1)
        assert [delta.text for delta in await attempt.next()] == ["[7]"]
        with pytest.raises(ValueError, match="broken"):
            await attempt.next()

    run(test)
