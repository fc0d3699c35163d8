"""What the initiator works with: its engines, its source pool, and the target's pool of the same shape."""

from dataclasses import dataclass

import torch

from base.errors import StartupError
from benchmarks.transfer import wire
from benchmarks.transfer.cases import Case, Protocol
from benchmarks.transfer.ours import Sending, source_pool
from benchmarks.transfer.pools import buffers_of, fill
from control.messages import Destination
from transfer.choices import ChecksumMode
from transfer.memory import BufferInfo


@dataclass(frozen=True)
class Pools:
    """Source and destination of one shape, both registered with what writes.

    kv: the source, uint8 [layers, rows, item_bytes].
    """

    kv: torch.Tensor
    source: BufferInfo
    destination: Destination

    @property
    def target(self) -> BufferInfo:
        return self.destination.buffers


class Workbench:
    """Keeps what sends for the whole run and pools until a case needs others."""

    def __init__(self, link: wire.Link, ib_device: str, checksums: ChecksumMode) -> None:
        self.link = link
        self._ib_device = ib_device
        self._checksums = checksums
        self._sending: dict[str, Sending] = {}
        self._shape: tuple[Protocol, int, int, int] | None = None
        self._pools: Pools | None = None

    def sending(self, protocol: Protocol) -> Sending:
        """Raises StartupError for a protocol that this machine does not have."""
        if protocol not in self._sending:
            self._sending[protocol] = Sending(self.link.local_host, protocol, self._ib_device, self._checksums)
        return self._sending[protocol]

    def pools(self, case: Case) -> Pools:
        """Pools of the case's shape. Raises StartupError if there is no memory for them, here or at the target."""
        shape = (case.protocol, case.layers, case.rows, case.item_bytes)
        if self._pools is None or shape != self._shape:
            self.close()
            prepare = wire.Prepare(
                protocol=case.protocol.value, layers=case.layers, rows=case.rows, item_bytes=case.item_bytes
            )
            sending = self.sending(case.protocol)
            try:
                kv = source_pool(case.layers, case.rows, case.item_bytes)
            except (OSError, OverflowError) as error:
                raise StartupError(f"no memory for a pool of {case}: {error}") from error
            fill(kv, seed=1)
            pools = Pools(kv, buffers_of(kv), self.link.ask(prepare, wire.Prepared).destination)
            sending.register(pools.source)
            self._shape, self._pools = shape, pools
        return self._pools

    def close(self) -> None:
        """Let go of the pools."""
        if self._pools is not None and self._shape is not None:
            self._sending[self._shape[0]].unregister(self._pools.source)
        self._pools = self._shape = None
