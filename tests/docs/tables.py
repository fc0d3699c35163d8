"""The tables of flags and metrics in docs/reference.md, and of fields in README.md, made from the code.

`python -m tests.docs.tables` rewrites them in place; a test checks that they are up to date.
"""

import re
from pathlib import Path

import typer

from base.metrics import Metrics
from cli.main import app
from gateway.endpoints import ENDPOINTS, Computes, Generates
from gateway.requests.body import HARMLESS
from gateway.requests.tokens import DetokenizeRequest

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference.md"
README = ROOT / "README.md"
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


BODIES = {
    endpoint.path: endpoint.body
    for endpoint in ENDPOINTS
    if isinstance(endpoint, Generates | Computes) and endpoint.body is not DetokenizeRequest
}
CELLS = ("yes", "refused", "ignored")
INPUT = {"model", "prompt", "messages", "input", "stream"}


def cell(path: str, field: str) -> str:
    """What an endpoint does with a field."""
    body = BODIES[path]
    return "yes" if field in body.model_fields else "refused" if field in body.not_carried_out() else "ignored"


def fields_table() -> str:
    """What becomes of each field at each endpoint that takes a prompt."""
    known = (
        {field for body in BODIES.values() for field in (*body.model_fields, *body.not_carried_out())}
        - INPUT
        - HARMLESS
    )
    rows: dict[tuple[str, ...], list[str]] = {}
    for field in sorted(known):
        rows.setdefault(tuple(cell(path, field) for path in BODIES), []).append(f"`{field}`")
    heads = [f"`{path}`" for path in BODIES]
    lines = [f"| fields | {' | '.join(heads)} |", "| --- |" + " --- |" * len(heads)]
    ordered = sorted(rows.items(), key=lambda row: [CELLS.index(each) for each in row[0]])
    return "\n".join([*lines, *(f"| {', '.join(fields)} | {' | '.join(cells)} |" for cells, fields in ordered)])


def readme_rows(marker: str) -> list[list[str]]:
    """The cells of a table of README.md, its head first."""
    table = README.read_text().partition(f"<!-- {marker} -->\n")[2].partition(f"\n<!-- /{marker} -->")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return [head, *rows]


def with_tables(path: Path) -> str:
    """The text of a page with its tables replaced."""
    text = path.read_text()
    tables = {REFERENCE: {"flags": flags_table, "metrics": metrics_table}, README: {"fields": fields_table}}
    for marker, table in ((marker, make()) for marker, make in tables[path].items()):
        block = f"<!-- {marker} -->\n{table}\n<!-- /{marker} -->"
        text, found = re.subn(rf"<!-- {marker} -->.*?<!-- /{marker} -->", lambda _: block, text, flags=re.DOTALL)  # noqa: B023
        if not found:
            raise ValueError(f"{path} has no place for the {marker} table")
    return text


def _default(value: object) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{getattr(value, 'value', value)}`"


if __name__ == "__main__":
    for page in (REFERENCE, README):
        page.write_text(with_tables(page))
