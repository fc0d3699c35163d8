"""How long each kernel of a profiled stretch of work took."""

from collections.abc import Iterable

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import profile

_BESIDE = "copy_items"
"""It copies for later layers beside the computation. A profile of a replayed graph does not tell streams apart."""


def kernel_times(profiled: profile) -> list[tuple[str, float]]:
    """The name and milliseconds of each kernel and copy, in the order in which they came to the device."""
    return exclusive_times(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events() or ()  # type: ignore[no-untyped-call]
        if event.device_type == DeviceType.CUDA
    )


def exclusive_times(ran: Iterable[tuple[float, float, str]]) -> list[tuple[str, float]]:
    """Names and milliseconds from start, end (microseconds) and name of each, ordered by start. No time counts twice.

    A kernel that starts while one before it runs waits for that (`kernels.triton.launch`), and counts from its end. One
    that copies beside the computation counts while nothing else runs.
    """
    ordered = sorted(ran)
    times = [0.0] * len(ordered)
    computed: list[tuple[float, float]] = []
    for beside in (False, True):
        over = 0.0
        for number, (start, end, name) in enumerate(ordered):
            if (_BESIDE in name) is not beside:
                continue
            start, over = max(start, over), max(over, end)
            hidden = sum(max(0.0, min(end, until) - max(start, since)) for since, until in computed) if beside else 0.0
            times[number] = max(0.0, end - start - hidden) / 1e3
            if not beside:
                computed.append((start, end))
    return [(name, ms) for (_, _, name), ms in zip(ordered, times, strict=True)]
