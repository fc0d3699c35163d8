"""Metadata of a configuration's field: the flag that sets it."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """Metadata of a dataclass field, as in `port: Annotated[int, Flag("HTTP port.", max=65535)] = 8000`.

    A field that is a tuple is a flag that may be repeated. name: the flag, if it is not named as the field. min, max:
    bounds, both allowed. env: an environment variable that sets the same. case_sensitive: whether the choices of a
    Literal are. positional: the words that belong to no flag. read: makes the value, for tuples of something else than
    words, from the flag's name and the words that it was given.
    """

    help: str
    _: KW_ONLY
    name: str | None = None
    min: float | None = None
    max: float | None = None
    env: str | None = None
    case_sensitive: bool = True
    positional: bool = False
    read: Callable[[str, Sequence[str] | None], Any] | None = None
