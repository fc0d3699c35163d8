"""How long each kernel of a profiled stretch of work took."""

from collections.abc import Iterable

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import profile


def kernel_times(profiled: profile) -> list[tuple[str, float]]:
    """The name and milliseconds of each kernel and copy, in the order in which they came to the device."""
    return exclusive_times(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events() or ()  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA
    )


def exclusive_times(ran: Iterable[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """Names and milliseconds from start, end (microseconds) and name of each, ordered by start.

    What comes while something before it still runs waits for that (`kernels.triton.launch`) or shares the device
    with it. It counts from the end of that, so that no time counts twice.
    """
    times, over = [], 0.0
    for start, end, name in sorted(ran):
        times.append((name, max(0.0, end - max(start, over)) / 1e3))
        over = max(over, end)
    return times
