"""Commands made of configurations: the fields of a dataclass are the flags of its command."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from base.flags import Flag

Config = TypeVar("Config")
Flags = Mapping[str, object]
"""A flag's name with its value; None and False leave the flag out, True stands for itself."""


def takes_flags(*, without: Collection[str] = ()) -> Callable[[Callable[[Config], None]], Callable[..., None]]:
    """Makes a command for typer of a function that takes one configuration. `without`: fields that are no flags."""

    def command_of(run: Callable[[Config], None]) -> Callable[..., None]:
        kind: type[Config] = get_type_hints(run)["config"]

        def command(**values: Any) -> None:
            run(configured(kind, values))

        command.__name__, command.__doc__ = run.__name__, run.__doc__
        parameters = [declared.parameter() for declared in declarations(kind) if declared.field.name not in without]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return command_of


def configured(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """The configuration with what the command line was given; flags that may be repeated become tuples."""
    tuples = {d.field.name for d in declarations(kind) if d.repeated}
    return kind(**{name: tuple(value or ()) if name in tuples else value for name, value in values.items()})


def option(kind: type, name: str) -> Any:
    """What typer is to know of one field's flag, for a command with a signature of its own."""
    return next(declared.option() for declared in declarations(kind) if declared.field.name == name)


def changed_flags(kind: type, config: object, without: Collection[str] = ()) -> Flags:
    """The flags that give a process of that kind what `config` has, where that is not the default anyway."""
    flags: dict[str, object] = {}
    for declared in declarations(kind):
        value = getattr(config, declared.field.name)
        if declared.field.name not in without and value != declared.field.default:
            flags |= {f"--no-{declared.name[2:]}": True} if value is False else {declared.name: value}
    return flags


@dataclass(frozen=True)
class Declared:
    """A field of a configuration that is a flag."""

    field: Field[Any]
    type: Any
    flag: Flag

    @property
    def name(self) -> str:
        """The flag as it is written."""
        return self.flag.name or f"--{self.field.name.replace('_', '-')}"

    @property
    def repeated(self) -> bool:
        """Whether the flag may be given several times."""
        return get_origin(self.type) is tuple

    def option(self) -> Any:
        """The flag as typer declares it."""
        flag = self.flag
        return typer.Option(
            *([flag.name] if flag.name else []),
            help=flag.help,
            envvar=flag.env,
            min=flag.min,
            max=flag.max,
            case_sensitive=flag.case_sensitive,
        )

    def parameter(self) -> Parameter:
        """The flag as a parameter of a command's function."""
        default = {MISSING: Parameter.empty, (): None}.get(self.field.default, self.field.default)
        kind = list[get_args(self.type)[0]] if self.repeated else self.type  # type: ignore[misc]
        annotation = Annotated[kind, self.option()]  # type: ignore[valid-type]
        return Parameter(self.field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def declarations(kind: type) -> Iterator[Declared]:
    """The flags of a configuration, in the order of its fields."""
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        annotated, flag = get_args(hints[field.name])
        yield Declared(field, annotated, flag)
