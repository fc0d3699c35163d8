"""Makes commands of configurations: each annotated field of a dataclass is a flag."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from base.flags import Flag
from cli.panels import PANEL_OF

Config = TypeVar("Config")
Flags = Mapping[str, object]
"""Values by flag. True gives the flag without a value; None and False leave it out."""


def takes_flags(run: Callable[[Config], None]) -> Callable[..., None]:
    """A typer command that makes the configuration from its flags and passes it to `run` as `config`."""
    kind: type[Config] = get_type_hints(run)["config"]

    def command(**values: Any) -> None:
        run(configured(kind, values))

    command.__name__, command.__doc__ = run.__name__, run.__doc__
    command.__signature__ = Signature([flag.parameter for flag in declared_flags(kind)])  # type: ignore[attr-defined]
    return command


def configured(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """The configuration with the values that typer read, by field. Raises StartupError for an invalid value."""
    flags = {flag.field.name: flag for flag in declared_flags(kind)}
    return kind(**{name: flags[name].value(value) for name, value in values.items()})


def changed_flags(kind: type, config: object, without: Collection[str] = ()) -> Flags:
    """The flags of `kind` with the values of `config` that are not the default. without: fields that are left out."""
    flags: dict[str, object] = {}
    for flag in declared_flags(kind):
        value = getattr(config, flag.field.name)
        if flag.field.name not in without and value != flag.field.default:
            flags |= {f"--no-{flag.name[2:]}": True} if value is False else {flag.name: value}
    return flags


@dataclass(frozen=True)
class DeclaredFlag:
    """A field of a configuration and the flag that sets it."""

    field: Field[Any]
    type: Any
    flag: Flag

    @property
    def name(self) -> str:
        return self.flag.name or f"--{self.field.name.replace('_', '-')}"

    @property
    def parameter(self) -> Parameter:
        """The parameter that typer makes the flag from."""
        default = {MISSING: Parameter.empty, (): None}.get(self.field.default, self.field.default)
        read_as: Any = list[str] if self._repeated else self.type
        flag = self.flag
        option = typer.Option(
            *([flag.name] if flag.name else []),
            help=flag.help,
            envvar=flag.env,
            min=flag.min,
            max=flag.max,
            case_sensitive=flag.case_sensitive,
            rich_help_panel=PANEL_OF.get(self.field.name),
        )
        annotation = Annotated[read_as, typer.Argument(help=flag.help) if flag.positional else option]
        return Parameter(self.field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def value(self, given: Any) -> Any:
        """The field's value, from what typer read."""
        if self.flag.read:
            return self.flag.read(self.name, given)
        return tuple(given or ()) if self._repeated else given

    @property
    def _repeated(self) -> bool:
        return get_origin(self.type) is tuple


def declared_flags(kind: type) -> Iterator[DeclaredFlag]:
    """The fields of a configuration that are flags, in order."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        for flag in getattr(hints[field.name], "__metadata__", ()):
            yield DeclaredFlag(field, hints[field.name].__origin__, flag)
