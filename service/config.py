"""The options that prefill and decode nodes share, read once at the edge."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from service.errors import StartupError
from service.exposure import check_processes
from service.logs import LogFormat
from transfer.messages import ADDRESS_PATTERN
from transfer.routes import TransferProtocol


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
    ib_device: str = ""
    log_level: str = "info"
    log_format: LogFormat = "text"

    @property
    def data_host(self) -> str:
        """The address that other processes reach this one at."""
        return self.advertise_host or self.host

    def torch_device(self) -> torch.device:
        """Raises StartupError if there is no such device."""
        try:
            # With an index: threads other than the main one have no device of their own to mean by "cuda".
            device = torch.device("cuda:0" if self.device == "cuda" else self.device)
        except RuntimeError as error:
            raise StartupError(f"--device {self.device}: expected cpu, cuda or cuda:N") from error
        if device.type not in ("cpu", "cuda"):
            raise StartupError(f"--device {self.device}: expected cpu, cuda or cuda:N")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise StartupError(f"--device {self.device}: this machine has {torch.cuda.device_count()} CUDA devices")
        return device

    def use_device(self) -> torch.device:
        """The device, from now on also the one that this thread's pinned memory and kernel launches are meant for.

        Raises StartupError if there is no such device.
        """
        device = self.torch_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device

    def check(self) -> None:
        """Raises StartupError for values that no machine could serve."""
        for name in ("page_size", "chunked_prefill_size"):
            if getattr(self, name) < 1:
                raise StartupError(f"--{name.replace('_', '-')} {getattr(self, name)}: expected at least 1")
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise StartupError(f"--mem-fraction-static {self.mem_fraction_static}: expected a number between 0 and 1")
        if self.host in ("0.0.0.0", "::") and not self.advertise_host:
            raise StartupError(f"--host {self.host} is not an address that others can reach; give --advertise-host too")
        check_processes("--host", self.host, self.key_dir, self.insecure)
        for gateway in self.gateways:
            if not re.match(ADDRESS_PATTERN, gateway):
                raise StartupError(f"--gateway {gateway}: expected HOST:PORT, the gateway's control port")
