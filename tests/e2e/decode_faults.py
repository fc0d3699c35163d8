"""What ends a decode node or cuts it off, for tests that need streams to go on elsewhere."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path

from tests.e2e.cluster import HOT_BUFFER, Cluster, Node
from tests.e2e.faulty_node import MODULE, Faults, Switches
from tests.e2e.spawn import fork


class Fault(Enum):
    DIES = signal.SIGKILL
    HANGS = signal.SIGSTOP
    DRAINS = signal.SIGTERM
    CUT_OFF = "hears nobody and is not heard"
    DEVICE_FAILS = "its device fails"


ENDS = {Fault.DIES: -signal.SIGKILL, Fault.DRAINS: 0, Fault.DEVICE_FAILS: 1}
"""Faults that end the process, and its exit code."""
TOLD = {Fault.DRAINS: "the decode node is stopping", Fault.DEVICE_FAILS: "cannot be used any more"}
"""Faults that a node tells of itself, with its words. The gateway notices the others by their silence."""


@contextmanager
def two_decode_nodes(model_path: Path, directory: Path) -> Iterator[Cluster]:
    """A cluster, ready, with two decode nodes that can meet with every fault."""

    def environment(name: str) -> dict[str, str]:
        return Faults(str(directory), name).environment()

    with Cluster(model_path, directory, MODULE, environment, spawn=fork) as cluster:
        cluster.gateway(served_model_name="tiny", tool_call_parser="hermes")
        cluster.prefill()
        for number in range(2):
            cluster.decode(f"decode-{number}", hisparse_config=HOT_BUFFER, drain_timeout=0.2, max_running_requests=16)
        yield cluster.wait_ready(decode=2)


def bring_about(fault: Fault, node: Node, cluster: Cluster) -> None:
    switches = Switches(cluster.directory)
    match fault:
        case Fault.CUT_OFF:
            switches.cut_off(node.name).touch()
        case Fault.DEVICE_FAILS:
            switches.failed_device(node.name).touch()
        case _:
            node.signal(fault.value)
    if fault in ENDS:
        assert node.process.wait(timeout=30) == ENDS[fault], node.log[-3000:]


def undo(fault: Fault, node: Node, cluster: Cluster) -> None:
    switches = Switches(cluster.directory)
    match fault:
        case Fault.CUT_OFF:
            switches.cut_off(node.name).unlink()
        case Fault.HANGS:
            node.signal(signal.SIGCONT)
        case _:
            switches.failed_device(node.name).unlink(missing_ok=True)
            cluster.restart(node)
