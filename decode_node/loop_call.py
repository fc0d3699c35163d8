"""Work that another thread wants done on the node's loop, since the loop owns the state that it concerns."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")


class LoopBusy(Exception):
    """The loop did not get to it in time. Nothing was done and nothing will be."""


@dataclass(frozen=True)
class LoopCall:
    """An event for the node's inbox; `run` never raises."""

    run: Callable[[], None]


def on_loop(post: Callable[[LoopCall], None], action: Callable[[], Result], timeout: float) -> Result:
    """Have the loop carry out `action`, and wait for its result or its exception.

    post: puts an event into the loop's inbox. Raises LoopBusy after `timeout` seconds in which it was not begun.
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
