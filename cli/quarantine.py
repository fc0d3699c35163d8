"""`hisparse-pd quarantine`: lists and frees slots of a decode node that a lost prefill process may still write to."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from base.errors import StartupError
from cli.panels import GroupedCommand

if TYPE_CHECKING:
    import httpx
    from pydantic import BaseModel
    from rich.table import Table

    from decode_node.quarantine_report import QuarantinedReservation

    Columns = Mapping[str, Callable[[QuarantinedReservation], str]]

Answer = TypeVar("Answer", bound="BaseModel")

_TIMEOUT_S = 15.0
"""Longer than the node waits for its own loop, so that the node reports that it is too busy."""

_NO_WRAP = 10_000
_RESERVATION: "Columns" = {
    "request": lambda r: r.request_id,
    "epoch": lambda r: str(r.epoch),
    "slots": lambda r: f"{r.slots}{' (reads)' if r.access == 'reads' else ''}",
    "for": lambda r: f"{r.quarantined_s:.1f} s",
    "free in": lambda r: "" if r.free_in_s is None else f"{r.free_in_s:.1f} s",
}
_WRITER: "Columns" = {
    "prefill process": lambda r: r.writer,
    "boot id": lambda r: r.boot_id,
    "last heard": lambda r: "unknown" if r.last_heard_s is None else f"{r.last_heard_s:.1f} s ago",
}
"""Columns about the process that may still be writing or reading."""

app = typer.Typer(name="quarantine", no_args_is_help=True, rich_markup_mode=None)

Url = Annotated[str, typer.Option(help="A decode node's HTTP address.")]
TokenDir = Annotated[
    Path | None,
    typer.Option("--key-dir", envvar="HISPARSE_PD_KEY_DIR", help="Key directory, for its operator.token."),
]


@app.callback()
def about() -> None:
    """List, and give up on, slots that a prefill node may still be writing to."""


@app.command("list", cls=GroupedCommand)
def list_reservations(url: Url = "http://127.0.0.1:8020", key_dir: TokenDir = None) -> None:
    """Show a decode node's quarantined reservations."""
    from decode_node.quarantine_report import QuarantineList

    found = _ask(QuarantineList, "GET", url, "/quarantine", key_dir)
    if found.reservations:
        _print(found.reservations)
    else:
        typer.echo("nothing is in quarantine")


@app.command(cls=GroupedCommand)
def evict(
    boot_id: Annotated[str, typer.Argument(help="Boot id of the prefill process, as `quarantine list` shows it.")],
    url: Url = "http://127.0.0.1:8020",
    force: Annotated[bool, typer.Option("--force", help="Also if the process was heard just now.")] = False,
    key_dir: TokenDir = None,
) -> None:
    """Free what is quarantined for a prefill process that is gone for good.

    The process must have ended: if it still writes, it corrupts the memory of other requests.
    """
    from decode_node.quarantine_report import Eviction

    params = {"boot_id": boot_id, "force": "true" if force else "false"}
    done = _ask(Eviction, "POST", url, "/quarantine/evict", key_dir, params)
    typer.echo(f"{done.slots} slots of {done.reservations} reservations will be free in {done.free_in_s:.1f} s")
    if done.also_written_by:
        typer.echo(f"except those that other ranks may still be writing to: boot ids {', '.join(done.also_written_by)}")
    if done.also_read_by:
        typer.echo(f"except those that other ranks may still be reading: boot ids {', '.join(done.also_read_by)}")


def _ask(
    answer: type[Answer], method: str, url: str, path: str, key_dir: Path | None, params: dict[str, str] | None = None
) -> Answer:
    """A decode node's answer. Raises StartupError with the node's reason if it refuses, or if there is none."""
    import httpx
    from pydantic import ValidationError

    from control.keys import load_token

    headers = {} if key_dir is None else {"Authorization": f"Bearer {load_token(key_dir)}"}
    try:
        response = httpx.request(method, url.rstrip("/") + path, params=params, headers=headers, timeout=_TIMEOUT_S)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise StartupError(f"cannot reach {url}: {error}; expected --url http://HOST:PORT of a decode node") from error
    if not response.is_success:
        what = _rejection_reason(response) or f"{url} answers {path} with {response.status_code}; is it a decode node?"
        raise StartupError(what)
    try:
        return answer.model_validate_json(response.content)
    except ValidationError as error:
        raise StartupError(f"{url} does not answer {path} as a decode node does") from error


def _rejection_reason(response: "httpx.Response") -> str | None:
    """The decode node's reason for refusing, or None if this is not a decode node's answer."""
    try:
        detail = response.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return None
    return None if detail == "Not Found" or not isinstance(detail, str) else detail


def _print(reservations: "Sequence[QuarantinedReservation]") -> None:
    """On a terminal a table for each prefill process, otherwise an unwrapped line for each reservation."""
    from rich.console import Console

    terminal = sys.stdout.isatty()
    console = Console(width=None if terminal else _NO_WRAP, highlight=False)
    slots = {(r.request_id, r.epoch, r.access): r.slots for r in reservations}
    console.print(f"{sum(slots.values())} slots in quarantine")
    if not terminal:
        console.print(_table(reservations, {**_RESERVATION, **_WRITER}))
        return
    for boot_id in dict.fromkeys(r.boot_id for r in reservations):
        of_process = [r for r in reservations if r.boot_id == boot_id]
        console.print("\n" + ", ".join(f"{name} {value(of_process[0])}" for name, value in _WRITER.items()))
        console.print(_table(of_process, _RESERVATION))


def _table(reservations: "Sequence[QuarantinedReservation]", columns: "Columns") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in columns:
        table.add_column(name, overflow="fold")
    for reservation in reservations:
        table.add_row(*(value(reservation) for value in columns.values()))
    return table
