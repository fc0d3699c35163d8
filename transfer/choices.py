"""What users choose between, in a module that imports nothing."""

from typing import Literal

TransferProtocol = Literal["auto", "rdma", "tcp", "shm"]
"""`auto`: for each pair of nodes the best transport that both have."""
ChecksumMode = Literal["off", "sample", "full"]
"""How much of what was sent has a checksum."""
