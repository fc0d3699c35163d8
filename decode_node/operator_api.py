"""The operator's HTTP routes of a decode node. The node's loop owns the state and carries out the actions."""

import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, TypeVar

from fastapi import APIRouter, Depends, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from decode_node.quarantine import Eviction, Quarantine, QuarantineList

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


def quarantine_router(
    quarantine: Quarantine,
    post: Callable[[LoopCall], None],
    timeout: float = 10.0,
    token: str | None = None,
) -> APIRouter:
    """GET /quarantine and POST /quarantine/evict?boot_id=...&force=....

    The node's loop, which `post` reaches, carries both out; 503 if it is too busy. token: 401 without it.
    """
    router = APIRouter(prefix="/quarantine", dependencies=[] if token is None else [Depends(_bearer_of(token))])

    def call(action: Callable[[], Result]) -> Result:
        try:
            return on_loop(post, action, timeout)
        except LoopBusy as error:
            raise HTTPException(503, f"{error}; nothing was evicted") from error

    @router.get("")
    def listing() -> QuarantineList:
        return call(quarantine.list)

    @router.post("/evict")
    def evict(boot_id: str, force: bool = False) -> Eviction:
        return call(lambda: quarantine.evict(boot_id, force))

    return router


def _bearer_of(token: str) -> Callable[..., None]:
    """A dependency that refuses requests without the token."""

    def check(shown: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]) -> None:
        if shown is None or not secrets.compare_digest(shown.credentials.encode(), token.encode()):
            raise HTTPException(
                401,
                "expected the header 'Authorization: Bearer TOKEN' with the operator.token of this node's --key-dir; "
                "`hisparse-pd quarantine --key-dir DIR` sends it",
                {"WWW-Authenticate": "Bearer"},
            )

    return check
