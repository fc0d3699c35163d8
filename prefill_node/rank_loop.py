"""The loop of a rank of a prefill node other than 0: has its worker do what rank 0 orders."""

import time
from collections.abc import Callable

from control.messages import Message, Peer
from prefill_node.decode_nodes import DecodeNodes
from prefill_node.orders import OF_OTHERS, End, Order, Report, Serve, StepEnded, TransferReport
from ranks.executor import Worker
from ranks.group import Ranks
from ranks.rank_line import line_to_first
from service.shell import NodeShell

_IDLE_WAIT_S = 0.2
_CLOSE_S = 1.0
_WATCH_S = 1.0


class RankLoop:
    """It pings the decode nodes itself, since each rank has a lease of its own. It says nothing else to them: rank 0
    hears what it has sent, and speaks for all."""

    def __init__(
        self,
        shell: NodeShell[Order | StepEnded],
        ranks: Ranks,
        new_worker: Callable[[Callable[[Report], None]], Worker[Order]],
    ) -> None:
        """new_worker: is told where the worker reports to."""
        self._shell = shell
        self._ranks = ranks
        self._decode_nodes = DecodeNodes(shell.control)
        self._served: tuple[Peer, ...] = ()
        self._watch_at = 0.0
        self._has_ended = False
        self._worker = new_worker(self._report)
        self._line = line_to_first(ranks.lines, OF_OTHERS, shell.inbox.put, ranks.fail)

    def run(self) -> None:
        """Obey until rank 0 ends the node. Raises GroupFailed if a rank ends otherwise, or fails in a step."""
        while not self._has_ended:
            for item in self._shell.receive(_IDLE_WAIT_S):
                self.take(item)
            lifecycle = self._shell.lifecycle
            lifecycle.follow(self._ranks.sync_phase(lifecycle.phase))
            self._ranks.check()
            if time.monotonic() >= self._watch_at:
                self._watch()
        self._worker.close(_CLOSE_S)
        self._ranks.leave()

    def take(self, item: tuple[Peer, Message] | Order | StepEnded) -> None:
        """Raises GroupFailed."""
        match item:
            case StepEnded(error=error):
                if error is not None:
                    raise self._ranks.failure(RuntimeError(error))
            case End():
                self._has_ended = True
            case Serve(decode_nodes=decode_nodes):
                self._served = decode_nodes
                self._watch()
                self._worker.take(item)
            case tuple():
                pass  # Messages are for rank 0.
            case _:
                self._worker.take(item)

    def _watch(self) -> None:
        self._watch_at = time.monotonic() + _WATCH_S
        self._decode_nodes.watch(self._served)

    def _report(self, report: Report) -> None:
        """On any thread of the worker. Layers are reported where there is one rank."""
        if isinstance(report, TransferReport):
            self._line.send(report.by_clock(self._ranks.clock_ahead))
        elif isinstance(report, StepEnded):
            self._shell.inbox.put(report)
