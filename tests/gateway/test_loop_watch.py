import asyncio
import time

from prometheus_client import CollectorRegistry, Histogram
from structlog.testing import capture_logs

from gateway.loop_watch import watch_loop


def held(*seconds: float) -> tuple[float, list[str]]:
    """The sum of the delays that are observed while callbacks hold the loop for so long each, and the warnings."""
    registry = CollectorRegistry()

    async def scenario() -> None:
        watching = asyncio.create_task(watch_loop(Histogram("delay", "", registry=registry)))
        for each in seconds:
            await asyncio.sleep(0.03)
            time.sleep(each)
        await asyncio.sleep(0.03)
        watching.cancel()

    with capture_logs() as logs:
        asyncio.run(scenario())
    return registry.get_sample_value("delay_sum") or 0.0, [entry["event"] for entry in logs]


def test_what_holds_the_loop_is_observed() -> None:
    delays, warnings = held(0.3, 0.2)
    assert delays > 0.44
    assert warnings == []


def test_a_loop_that_was_held_for_more_than_a_second_is_logged() -> None:
    assert held(1.1)[1] == ["the event loop was held"]
