"""How `hisparse-pd bench transfer` is configured."""

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from base.errors import StartupError
from base.flags import Flag
from benchmarks.documents import check_writable
from benchmarks.flags import parse_choices, parse_numbers, swept
from benchmarks.plotting import check_installed
from benchmarks.transfer.cases import Case, Fragmentation, Group, Protocol, Sweep
from prefill_node.config import TransferChecksum
from service.config import IbDevice

_layouts = partial(parse_choices, kind=Fragmentation)
_protocols = partial(parse_choices, kind=Protocol)
_groups = partial(parse_choices, kind=Group)


@dataclass(frozen=True, kw_only=True)
class TransferBench:
    """The flags of the benchmark. What is swept stays at its default where it is empty, and `methods` are all then."""

    role: Annotated[Literal["both", "target", "initiator"], Flag("Both on this machine, or one side of two.")] = "both"
    target: Annotated[str | None, Flag("HOST:PORT that `--role target` printed.")] = None
    host: Annotated[str, Flag("Address that a target listens at.")] = "127.0.0.1"
    port: Annotated[int, Flag("Port of a target; 0 takes a free one.", min=0, max=65535)] = 0
    tokens: Annotated[tuple[int, ...], swept("Tokens per request, such as 32768 or 32K.", parse_numbers)] = ()
    layers: Annotated[tuple[int, ...], swept("Layers.", parse_numbers)] = ()
    item_bytes: Annotated[tuple[int, ...], swept("Bytes of a token in one layer.", parse_numbers)] = ()
    page_size: Annotated[tuple[int, ...], swept("Tokens per page.", parse_numbers)] = ()
    source: Annotated[
        tuple[Fragmentation, ...], swept("Source layout: contiguous, pages or items (apart).", _layouts)
    ] = ()
    destination: Annotated[
        tuple[Fragmentation, ...], swept("Destination layout: contiguous, pages or items (apart).", _layouts)
    ] = ()
    protocol: Annotated[tuple[Protocol, ...], swept("tcp, rdma or shm.", _protocols)] = ()
    concurrency: Annotated[tuple[int, ...], swept("Requests that are sent at once.", parse_numbers)] = ()
    rounds: Annotated[int | None, Flag("Timed runs per method and case; default 15.", min=1)] = None
    quick: Annotated[bool, Flag("A few small cases, in less than 30 seconds.", name="--quick")] = False
    methods: Annotated[
        tuple[Group, ...],
        swept("ours, token, page, large or nixl; default: all that is installed.", _groups),
    ] = ()
    overlap: Annotated[bool, Flag("Measure how long a prompt waits when it is sent while its chunks compute.")] = True
    transfer_checksum: TransferChecksum = "sample"
    ib_device: IbDevice = ""
    json: Annotated[Path, Flag("Where to write every figure.")] = Path("bench-transfer.json")
    png: Annotated[Path, Flag("Where to draw latency against tokens.")] = Path("bench-transfer.png")

    @property
    def sweep(self) -> Sweep:
        """What is swept."""
        return Sweep(**{each.name: getattr(self, each.name) for each in fields(Case)})

    def check(self) -> None:
        """Raises StartupError for options that contradict each other."""
        if self.role == "initiator" and self.target is None:
            raise StartupError("--role initiator needs --target HOST:PORT, as `--role target` prints it")
        if self.role != "initiator" and self.target is not None:
            raise StartupError(f"--target is for --role initiator, not for --role {self.role}")
        if self.role != "target":
            check_installed()
            check_writable(self.json, self.png)
