"""What fixtures start as often as a test asks for it, and end after the test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Started = TypeVar("Started")


@contextmanager
def starting(start: Callable[Given, Started], end: Callable[[Started], object]) -> Iterator[Callable[Given, Started]]:
    """`start`. All that it returned is ended at the end of the context, the latest first."""
    with ExitStack() as ends:

        def start_one(*args: Given.args, **kwargs: Given.kwargs) -> Started:
            one = start(*args, **kwargs)
            ends.callback(end, one)
            return one

        yield start_one
