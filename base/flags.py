"""What a field of a configuration says of the flag that sets it."""

from dataclasses import KW_ONLY, dataclass


@dataclass(frozen=True)
class Flag:
    """Metadata of a dataclass field, as in `port: Annotated[int, Flag("HTTP port.", max=65535)] = 8000`.

    The flag is called as the field is unless `name` says otherwise. `min` and `max` may be reached. `env` is an
    environment variable that is read where the flag is not given. `case_sensitive`: of the choices of a Literal.
    """

    help: str
    _: KW_ONLY
    name: str | None = None
    min: float | None = None
    max: float | None = None
    env: str | None = None
    case_sensitive: bool = True
