"""The command `hisparse-pd`. Commands import what they need when they run, so that --help is fast."""

import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from setproctitle import setproctitle
from typer.core import TyperGroup

from base.errors import ProcessFailed, StartupError
from base.version import VERSION
from cli import config_show, quarantine
from cli.config import ServeConfig, SizingConfig
from cli.flags import takes_flags
from cli.panels import GroupedCommand
from cli.reasons import leave, take_place
from cli.refusals import refusals
from decode_node.config import DecodeConfig
from gateway.config import GatewayConfig
from model.families import FamilyName, ShapeName
from prefill_node.config import PrefillConfig
from ranks.place import RankPlace
from service.lifecycle import end_on_sigterm_until_served, raise_file_limit

_SECRET_FLAGS = ("--api-key",)


class Commands(TyperGroup):
    """The group of all commands. An invalid flag is an error of one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Raises StartupError if a value is invalid or a flag is missing."""
        with refusals():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Each command with the first paragraph of its help, of which the default shows the beginning."""
        commands = [(name, self.commands[name].help or "") for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(name, text.partition("\n\n")[0]) for name, text in commands])


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(quarantine.app)
app.add_typer(config_show.app)
for command in entry_points(group="hisparse_pd.commands"):
    # `bench`: benchmarks use the whole product, which does not know them.
    app.add_typer(command.load(), name=command.name)


def show_version(wanted: bool) -> None:
    """Print the versions of the program and of the wire protocol, and exit."""
    if wanted:
        from control.codec import PROTOCOL_VERSION

        typer.echo(f"hisparse-pd {VERSION}, wire protocol {PROTOCOL_VERSION}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Prefill/decode disaggregation with direct-to-DRAM KV transfer and HiSparse decoding."""


@app.command(cls=GroupedCommand)
@takes_flags
def prefill(config: PrefillConfig) -> None:
    """Run a prefill node: prompt in, KV out."""
    _run_node(config)


@app.command(cls=GroupedCommand)
@takes_flags
def decode(config: DecodeConfig) -> None:
    """Run a decode node: full KV in host memory, hot buffers on the device."""
    _run_node(config)


@app.command(cls=GroupedCommand)
@takes_flags
def gateway(config: GatewayConfig) -> None:
    """Run a gateway: the OpenAI HTTP API and the registry of nodes."""
    from gateway.process import run_gateway

    run_gateway(config)


@app.command(cls=GroupedCommand)
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


@app.command(cls=GroupedCommand)
@takes_flags
def serve(config: ServeConfig) -> None:
    """Run a gateway with prefill and decode processes on this machine."""
    from cli.serve import check_start, plan, serve_until_stopped

    planned = plan(config)
    check_start(config)
    raise typer.Exit(serve_until_stopped(planned))


@app.command(cls=GroupedCommand)
@takes_flags
def sizing(config: SizingConfig) -> None:
    """Print what a node of several GPUs holds and can at most do, for a published shape. Takes no GPU."""
    from cli.sizing import report

    typer.echo(report(config))


@app.command(cls=GroupedCommand)
def check() -> None:
    """Say what this machine has for the service, what it lacks, and what is used instead. 1: it lacks what it needs."""
    from cli.check import report

    table, code = report()
    typer.echo(table)
    raise typer.Exit(code)


@app.command("tiny-model", cls=GroupedCommand)
def tiny_model(
    directory: Annotated[Path, typer.Argument(help="Where to write the checkpoint.")],
    family: Annotated[FamilyName, typer.Option(help="Model family.")] = "deepseek_v32",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    layers: Annotated[int | None, typer.Option(help="Hidden layers; default: 4, or all of the shape's.")] = None,
    hidden_size: Annotated[int, typer.Option(help="Width of the hidden states.")] = 64,
    index_topk: Annotated[int, typer.Option(help="Positions that a layer attends to.")] = 64,
    index_n_heads: Annotated[int, typer.Option(help="Heads of the indexer, at least 16.")] = 32,
    max_position_embeddings: Annotated[int, typer.Option(help="Context length.")] = 8192,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens; default: bytes. More are learned from Python sources of this machine."),
    ] = None,
    quantization: Annotated[
        Literal["fp8"] | None, typer.Option(help="Store weights in block-fp8, as published checkpoints do.")
    ] = None,
    scale_format: Annotated[
        Literal["float", "ue8m0"], typer.Option(help="Of fp8: scales are any numbers, or powers of two.")
    ] = "float",
    shape: Annotated[
        ShapeName | None, typer.Option(help="Widths of a published model instead; takes --config-only.")
    ] = None,
    routed_experts: Annotated[
        int | None, typer.Option(help="Experts of a layer of that shape; default: as published.")
    ] = None,
    draft_layer: Annotated[bool, typer.Option(help="With a multi-token prediction layer, which drafts tokens.")] = True,
    config_only: Annotated[
        bool, typer.Option("--config-only", help="Write no weights: for --load-format dummy, which needs none.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write to a directory that is not empty, over its files.")
    ] = False,
) -> None:
    """Write a complete random checkpoint, to try things out with, or the directory for a model with dummy weights."""
    from kernels.operands import BlockFp8
    from model.families import published_config
    from model.tiny import write_tiny_checkpoint, write_without_weights
    from model.tiny_tokenizer import BYTE_VOCAB_SIZE

    if (shape is None) == config_only:
        raise StartupError(
            "tiny-model: --shape and --config-only go together: nobody wants random weights of that size"
        )
    if shape is not None and vocab_size is not None:
        raise StartupError("tiny-model: --vocab-size: a published shape has its own vocabulary")
    if not force and directory.is_dir() and any(directory.iterdir()):
        raise StartupError(f"tiny-model: {directory} is not empty; give another directory, or --force")
    try:
        if shape is not None:
            described = published_config(shape, layers, routed_experts)
            write_without_weights(directory, described | {"num_nextn_predict_layers": int(draft_layer)})
        else:
            write_tiny_checkpoint(
                directory,
                family,
                seed,
                layers=4 if layers is None else layers,
                hidden_size=hidden_size,
                index_topk=index_topk,
                index_n_heads=index_n_heads,
                max_position_embeddings=max_position_embeddings,
                vocab_size=BYTE_VOCAB_SIZE if vocab_size is None else vocab_size,
                fp8=BlockFp8(power_of_two=scale_format == "ue8m0") if quantization else None,
                draft_layer=draft_layer,
            )
    except ValueError as error:
        raise StartupError(f"tiny-model: {error}") from error
    what = f"a {family} checkpoint of random weights" if shape is None else f"{shape} without weights"
    typer.echo(f"{directory}: {what}")


def title(words: Sequence[str]) -> str:
    """The command line without its secrets, as the process's title."""
    shown = ["hisparse-pd"]
    for before, word in pairwise(["", *words]):
        flag, equals, _ = word.partition("=")
        hidden = "***" if before in _SECRET_FLAGS else f"{flag}=***" if equals and flag in _SECRET_FLAGS else word
        shown.append(hidden)
    return " ".join(shown)


def main(args: list[str] | None = None) -> None:
    """Run a command. An error is one line on standard error; the exit code is 2 at start-up and 1 later."""
    setproctitle(title(sys.argv[1:] if args is None else args))
    end_on_sigterm_until_served()
    raise_file_limit()
    take_place()
    try:
        app(args=args)
    except (StartupError, ProcessFailed) as error:
        leave(str(error))
        typer.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, StartupError) else 1)
    except Exception as error:
        leave(f"{type(error).__name__}: {error}")
        raise


def _run_node(config: PrefillConfig | DecodeConfig) -> None:
    """Run a node of one process, or one of the ranks of a node, or start all of them."""
    from cli.rank_group import check_hosts, run_rank, run_ranks, runner_of

    check_hosts(config)
    if not config.gateways:
        raise StartupError(
            "no --gateway: a node gets its requests from gateways; give HOST:PORT of a gateway's control port"
        )
    if (place := RankPlace.taken()) is not None:
        run_rank(config, place)
    elif config.ranks > 1:
        raise typer.Exit(run_ranks(config))
    else:
        runner_of(config)(config)


if __name__ == "__main__":
    main()
