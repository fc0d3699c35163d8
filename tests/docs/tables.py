"""The tables of flags and metrics in docs/reference.md, made from the code.

`python -m tests.docs.tables` rewrites them in place; a test checks that they are up to date.
"""

import re
from pathlib import Path

import typer

from base.metrics import Metrics
from cli.main import app

REFERENCE = Path(__file__).parents[2] / "docs" / "reference.md"
COMMANDS = ("serve", "gateway", "prefill", "decode", "tiny-model")


def flags_table() -> str:
    """Every flag, what it does, its default, and the commands that take it."""
    flags: dict[str, tuple[str, dict[str, list[str]]]] = {}
    group = typer.main.get_command(app)
    for name in COMMANDS:
        for parameter in group.commands[name].params:  # type: ignore[attr-defined]
            if parameter.name == "help" or not parameter.opts[0].startswith("--"):
                continue
            text, defaults = flags.setdefault(parameter.opts[0], (parameter.help or "", {}))
            defaults.setdefault(_default(parameter.default), []).append(name)
    lines = ["| flag | what it does | default | commands |", "| --- | --- | --- | --- |"]
    for flag, (text, defaults) in sorted(flags.items()):
        default = "; ".join(
            value if len(defaults) == 1 else f"{value} ({', '.join(commands)})" for value, commands in defaults.items()
        )
        takers = [command for command in COMMANDS if any(command in commands for commands in defaults.values())]
        lines.append(f"| `{flag}` | {text} | {default} | {', '.join(takers)} |")
    return "\n".join(lines)


def metrics_table() -> str:
    """Every metric with its type, labels and meaning."""
    metrics = Metrics()
    lines = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for collector in sorted(vars(metrics).values(), key=lambda value: getattr(value, "_name", "")):
        if not hasattr(collector, "_labelnames"):
            continue
        suffix = "_total" if collector._type == "counter" else ""
        labels = ", ".join(f"`{label}`" for label in collector._labelnames)
        name = f"{collector._name}{suffix}"
        lines.append(f"| `{name}` | {collector._type} | {labels} | {collector._documentation} |")
    return "\n".join(lines)


def with_tables(text: str) -> str:
    """The text of docs/reference.md with both tables replaced."""
    for marker, table in (("flags", flags_table()), ("metrics", metrics_table())):
        block = f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->"
        text, found = re.subn(rf"<!-- {marker} -->.*?<!-- /{marker} -->", lambda _: block, text, flags=re.DOTALL)  # noqa: B023
        if not found:
            raise ValueError(f"{REFERENCE} has no place for the {marker} table")
    return text


def _default(value: object) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{getattr(value, 'value', value)}`"


if __name__ == "__main__":
    REFERENCE.write_text(with_tables(REFERENCE.read_text()))
