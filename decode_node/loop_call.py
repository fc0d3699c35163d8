"""Runs an action of another thread on the node's loop, which owns the state that the action needs."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")


class LoopBusy(Exception):
    """The loop did not begin the action in time, and never will."""


@dataclass(frozen=True)
class LoopCall:
    """An action in the node's inbox. `run` never raises."""

    run: Callable[[], None]


def on_loop(post: Callable[[LoopCall], None], action: Callable[[], Result], timeout: float) -> Result:
    """Have the loop run `action`, and wait for its result or its exception.

    post: puts an event into the loop's inbox. Raises LoopBusy if the action was not begun within `timeout` seconds.
    """
    result: Future[Result] = Future()

    def run() -> None:
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(action())
        except Exception as error:
            result.set_exception(error)

    post(LoopCall(run))
    try:
        return result.result(timeout)
    except TimeoutError:
        if result.cancel():
            raise LoopBusy(f"the node's loop did not answer within {timeout:g} s") from None
        return result.result()
