"""The options that prefill and decode nodes share, read once at the edge."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from base.errors import StartupError
from base.logs import LogFormat
from control.messages import ADDRESS_PATTERN
from service.exposure import check_processes
from service.lifecycle import DRAIN_TIMEOUT_S
from transfer.ports import ClaimedPorts, PortRange
from transfer.routes import TransferProtocol, choose_transports, engines_among

_WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class NodeConfig:
    """Where a node listens, whom it tells, and what it serves. Each field is the flag of the same name."""

    model_path: Path
    gateways: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0
    control_port: int = 0
    advertise_host: str | None = None
    key_dir: Path | None = None
    insecure: bool = False
    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention_backend: Literal["auto", "triton", "torch"] = "auto"
    context_length: int | None = None
    mem_fraction_static: float | None = None
    chunked_prefill_size: int = 2048
    page_size: int = 64
    transfer_protocol: TransferProtocol = "auto"
    transfer_host: str | None = None
    transfer_ports: str = "15000-16999"
    ib_device: str = ""
    drain_timeout: float = DRAIN_TIMEOUT_S
    log_level: str = "info"
    log_format: LogFormat = "text"

    @property
    def advertised_host(self) -> str:
        """The address that other processes reach this one at, except with KV."""
        return self.advertise_host or self.host

    @property
    def data_host(self) -> str:
        """The address that KV travels to."""
        return self.transfer_host or self.advertised_host

    def use_device(self) -> torch.device:
        """The device to run on, which from here on is the only one that this process sees: its GPU is `cuda:0` to it.

        Libraries touch the first device that they see, from threads of their own, and would take memory on another
        process's GPU. Raises StartupError if there is no such device.
        """
        kind, _, number = self.device.partition(":")
        if kind == "cpu" and not number:
            return torch.device("cpu")
        if kind != "cuda" or not (number or "0").isdecimal():
            raise StartupError(f"--device {self.device}: expected cpu, cuda or cuda:N")
        found = torch.cuda.device_count()
        if int(number or 0) >= found:
            raise StartupError(f"--device {self.device}: this machine has {found} CUDA devices")
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(found)))
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[int(number or 0)]
        return torch.device("cuda", 0)

    def claim_transfer_ports(self) -> ClaimedPorts | None:
        """The ports of this node's transfer engines; None if it has no engine. Raises StartupError if none are free."""
        engines = self._num_engines()
        return ClaimedPorts(PortRange.parse(self.transfer_ports, engines), engines) if engines else None

    def _num_engines(self) -> int:
        """Raises StartupError for a transport that this machine lacks."""
        return len(engines_among(choose_transports(self.transfer_protocol, self.ib_device)))

    def check(self) -> None:
        """Raises StartupError for values that no machine could serve, or for a transport that this one lacks."""
        for name in ("page_size", "chunked_prefill_size"):
            if getattr(self, name) < 1:
                raise StartupError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise StartupError(f"--mem-fraction-static {self.mem_fraction_static}: expected a number between 0 and 1")
        if self.host in _WILDCARDS and not self.advertise_host:
            raise StartupError(f"--host {self.host} is not an address that others can reach; give --advertise-host too")
        check_processes("--host", self.host, self.key_dir, self.insecure)
        if self.transfer_host is not None:
            if self.transfer_host in _WILDCARDS:
                raise StartupError(
                    f"--transfer-host {self.transfer_host} is not an address that others can reach; give one of the "
                    "data network"
                )
            if not re.match(ADDRESS_PATTERN, f"{self.transfer_host}:0"):
                raise StartupError(f"--transfer-host {self.transfer_host}: expected a host name or an IPv4 address")
        PortRange.parse(self.transfer_ports, self._num_engines())
        for gateway in self.gateways:
            if not re.match(ADDRESS_PATTERN, gateway):
                raise StartupError(f"--gateway {gateway}: expected HOST:PORT, the gateway's control port")
