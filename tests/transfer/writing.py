"""One write over a channel, from its first batch to its end."""

from collections.abc import Callable, Iterable

from transfer.planner import Descriptors
from transfer.writer import Channel, Outcome, Pipeline, TransferError, Write


def write(channel: Channel, batches: Iterable[Descriptors], go_on: Callable[[], bool] = lambda: True) -> bool:
    """Whether all of it was posted. Raises TransferError if some of it failed."""
    pipeline = Pipeline(channel)
    ended: list[bool] = []
    write = Write(on_end=lambda: ended.append(True), go_on=go_on)
    complete = all(pipeline.post(write, batch) for batch in batches)
    pipeline.close(write)
    pipeline.drain()
    assert ended == [True]
    if write.outcome is not Outcome.LANDED:
        raise TransferError(write.outcome.name)
    channel.check()
    return complete
