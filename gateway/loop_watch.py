"""How late the event loop of a gateway is: what one client's work costs all others."""

import asyncio
import time

import structlog
from prometheus_client import Histogram

log = structlog.get_logger(__name__)

_PERIOD_S = 0.02
_WARN_S = 1.0


async def watch_loop(delays: Histogram) -> None:
    """Observe, every 20 ms until cancelled, how many seconds after its time a timer of this loop runs.

    That is how long callbacks have held the loop since, less at most the period, if the machine has a processor free.
    A delay of more than a second is logged.
    """
    while True:
        due = time.monotonic() + _PERIOD_S
        await asyncio.sleep(_PERIOD_S)
        delay = time.monotonic() - due
        delays.observe(max(0.0, delay))
        if delay > _WARN_S:
            log.warning("the event loop was held", seconds=round(delay, 2))
