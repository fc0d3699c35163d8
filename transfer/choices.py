"""The names that users choose between, in a module that imports nothing."""

from typing import Literal

EngineTransport = Literal["rdma", "tcp"]
Transport = Literal["shm", EngineTransport]
"""The entries of `transfer.transports.TRANSPORTS`."""
TransferProtocol = Literal["auto", Transport]
"""`auto`: for each pair of nodes the best transport that both have."""
ChecksumMode = Literal["off", "sample", "full"]
"""How much of what was sent has a checksum."""
