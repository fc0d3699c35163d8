"""`hisparse-pd keygen`: the keys by which a cluster's processes know each other."""

from pathlib import Path
from typing import Annotated

import typer


def keygen(
    directory: Annotated[Path, typer.Argument(help="Where to write the keys; made if it is not there.")],
    node: Annotated[
        list[str] | None,
        typer.Option(help="ROLE:NAME, such as prefill:prefill-7: add a key for one node; may be repeated."),
    ] = None,
) -> None:
    """Make the keys of a cluster, or with --node further ones for single nodes. Nothing is ever overwritten."""
    from control.keys import generate, generate_node

    if not node:
        generate(directory)
        typer.echo(f"keys in {directory}: give it to every process as --key-dir")
    for one in node or ():
        secret = generate_node(directory, one)
        typer.echo(f"{secret}: for that node's --key-dir; {directory / 'allowed'}: for everybody's")
