"""What a field of a configuration says of the flag that sets it."""

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any


@dataclass(frozen=True)
class Flag:
    """Metadata of a dataclass field, as in `port: Annotated[int, Flag("HTTP port.", max=65535)] = 8000`.

    A field that is a tuple is a flag that may be repeated. help: what the flag does. name: the flag, where it is not
    called as the field. min, max: bounds, which may be reached. env: an environment variable that stands for the flag.
    case_sensitive: of the choices of a Literal. positional: the words that belong to no flag. read: makes the value of
    the flag's name and of the words that it was given, for tuples of something else than words.
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
