"""The side that takes the bytes: a host pool, offered to whatever writes. It does nothing while it is written to."""

import socket
import sys
from collections.abc import Callable
from dataclasses import asdict

import numpy as np
import structlog

from base.errors import StartupError
from base.logs import configure_logging
from base.version import VERSION
from benchmarks.machine import this_machine
from benchmarks.transfer import nixl_agent, ours, wire
from benchmarks.transfer.overlap_decode import DecodeSide
from benchmarks.transfer.pools import digests
from control.messages import Destination
from transfer.choices import TransferProtocol
from transfer.transports import Transports

log = structlog.get_logger(__name__)


class Target:
    """Serves one initiator until it goes."""

    def __init__(self, link: wire.Link, ib_device: str) -> None:
        self._link = link
        self._ib_device = ib_device
        self._transports: dict[str, Transports] = {}
        self._receiving: ours.ReceivingPool | None = None
        self._nixl: nixl_agent.Agent | None = None
        self._decode: DecodeSide | None = None

    def serve(self) -> None:
        """Answer until the initiator closes the connection or ends."""
        try:
            while True:
                self._link.send(self._answer(self._link.receive()))
        except (wire.Disconnected, OSError) as error:
            log.info("the initiator has gone", reason=str(error))
        finally:
            self._close()
            self._link.close()

    def _answer(self, saying: wire.Saying) -> wire.Saying:
        try:
            return self._act(saying)
        except Exception as error:
            # It is the initiator that shows it to somebody.
            return wire.Failed(reason=str(error) or repr(error))

    def _act(self, saying: wire.Saying) -> wire.Saying:
        match saying:
            case wire.Hello():
                return wire.Welcome(version=VERSION, machine=asdict(this_machine()), has_nixl=nixl_agent.is_installed())
            case wire.Prepare():
                return wire.Prepared(destination=self._prepare(saying))
            case wire.Wipe():
                self._pool().kv.zero_()
            case wire.Digest():
                return wire.Digests(layers=digests(self._pool().kv, np.frombuffer(saying.slots, dtype="<i8")))
            case wire.OpenNixl():
                self._nixl = nixl_agent.Agent("target", saying.ucx_tls)
                self._nixl.register(self._pool().buffers)
                return wire.NixlOpened(metadata=self._nixl.metadata)
            case wire.CloseNixl():
                self._close_nixl()
            case wire.OpenDecode():
                self._open_decode(saying)
            case wire.AdmitOne() if self._decode is not None:
                return wire.PromptAdmitted(**asdict(self._decode.admit_one()))
            case wire.CloseDecode():
                self._close_decode()
            case _:
                raise StartupError(f"{type(saying).__name__} is not for a target")
        return wire.Done()

    def _prepare(self, wanted: wire.Prepare) -> Destination:
        self._close()
        transports = self._offered(wanted.protocol)
        self._receiving = ours.ReceivingPool(transports, wanted.layers, wanted.rows, wanted.item_bytes)
        return self._receiving.destination

    def _open_decode(self, wanted: wire.OpenDecode) -> None:
        self._close()
        transports = self._offered(wanted.protocol)
        self._decode = DecodeSide(self._link.local_host, transports, wanted.prefill, wanted.tokens)

    def _offered(self, protocol: TransferProtocol) -> Transports:
        if protocol not in self._transports:
            self._transports[protocol] = Transports(self._link.local_host, protocol, self._ib_device)
        return self._transports[protocol]

    def _pool(self) -> ours.ReceivingPool:
        if self._receiving is None:
            raise StartupError("nothing was prepared")
        return self._receiving

    def _close_nixl(self) -> None:
        if self._nixl is not None:
            self._nixl.close()
            self._nixl = None

    def _close_decode(self) -> None:
        if self._decode is not None:
            self._decode.close()
            self._decode = None

    def _close(self) -> None:
        self._close_decode()
        self._close_nixl()
        if self._receiving is not None:
            self._receiving.close()
            self._receiving = None


def listen(host: str, port: int, ib_device: str, announce: Callable[[str], None]) -> None:
    """Wait for an initiator, serve it, return when it has gone. Raises StartupError if the port is taken."""
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --host or --port"
        ) from error
    with listener:
        announce(f"{host}:{listener.getsockname()[1]}")
        connection, _ = listener.accept()
    Target(wire.Link(connection), ib_device).serve()


if __name__ == "__main__":
    configure_logging("warning", "text", "bench target")
    # Started by an initiator of the same machine, with a descriptor of the connection and the RDMA devices to use.
    Target(wire.Link(socket.socket(fileno=int(sys.argv[1]))), sys.argv[2]).serve()
