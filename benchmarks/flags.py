"""Flags that take several values: repeated, or separated by commas."""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from base.errors import StartupError
from base.flags import Flag

Choice = TypeVar("Choice", bound=StrEnum)


def swept(help_text: str, read: Callable[[str, Sequence[str] | None], Any]) -> Flag:
    """A flag that takes several values, which `read` makes of its name and words."""
    return Flag(f"{help_text} Several: repeat it or separate them by commas.", read=read)


def parse_numbers(option: str, words: Sequence[str] | None) -> tuple[int, ...]:
    """The values of such an option; 32K and 1M are multiples of 1024.

    Raises StartupError, naming the option, for a word that is no number.
    """
    try:
        return tuple(_number(word) for word in _words(words))
    except ValueError as error:
        raise StartupError(f"{option} {','.join(words or ())}: expected numbers such as 2048 or 32K") from error


def parse_rates(option: str, words: Sequence[str] | None) -> tuple[float, ...]:
    """The same of rates, each above 0. Raises StartupError for a word that is none."""
    try:
        rates = tuple(float(word) for word in _words(words))
    except ValueError:
        rates = (0.0,)
    if not all(rate > 0 for rate in rates):
        raise StartupError(f"{option} {','.join(words or ())}: expected numbers above 0 such as 2.5, or inf")
    return rates


def parse_choices(option: str, words: Sequence[str] | None, kind: type[Choice]) -> tuple[Choice, ...]:
    """The same of names. Raises StartupError for a word that is none of `kind`."""
    try:
        return tuple(kind(word) for word in _words(words))
    except ValueError as error:
        raise StartupError(f"{option} {','.join(words or ())}: expected {' or '.join(kind)}") from error


def _words(groups: Sequence[str] | None) -> list[str]:
    return [word.strip() for group in groups or () for word in group.split(",")]


def _number(word: str) -> int:
    factor = {"K": 1 << 10, "M": 1 << 20}.get(word[-1:].upper(), 1)
    return int(word if factor == 1 else word[:-1]) * factor
