"""A worse cable: delays and loses what hosts send.

`python -m tests.e2e.wire --delay-ms 10 --loss 0.01 HOST_SIDE:BRIDGE_SIDE ...` takes frames from each interface of a
pair and puts them on the other one. It delays and loses what comes from the host's side.
"""

import argparse
import ctypes
import heapq
import random
import select
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from fcntl import ioctl

_ALL_PROTOCOLS = 3
_OUTGOING = 4
_BUFFER_BYTES = 8 << 20
_RECEIVE_BUFFER_FORCE = 33
_SIOCETHTOOL = 0x8946
_SET_TX_CHECKSUM = 0x17


def finish_packets(interface: str) -> None:
    """Let the kernel finish what this interface sends, checksums and segments, and leave none of it to a device."""
    value = ctypes.create_string_buffer(struct.pack("II", _SET_TX_CHECKSUM, 0))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        ioctl(control, _SIOCETHTOOL, struct.pack("16sP", interface.encode(), ctypes.addressof(value)))


@dataclass(frozen=True)
class _Way:
    """From one interface to another."""

    source: socket.socket
    target: socket.socket
    delay_s: float
    loss: float


def carry(pairs: list[tuple[str, str]], delay_s: float, loss: float) -> None:
    """Carry frames until the process is killed."""
    chance = random.Random(0)
    ways: dict[int, _Way] = {}
    for host_side, bridge_side in pairs:
        near, far = _opened(host_side), _opened(bridge_side)
        ways[near.fileno()] = _Way(near, far, delay_s, loss)
        ways[far.fileno()] = _Way(far, near, 0.0, 0.0)
    poll = select.poll()
    for number in ways:
        poll.register(number, select.POLLIN)
    under_way: list[tuple[float, int, _Way, bytes]] = []
    count = 0
    print("ready", flush=True)
    while True:
        wait_ms = (under_way[0][0] - time.monotonic()) * 1000 if under_way else 1000.0
        for number, _ in poll.poll(max(0.0, wait_ms)):
            way = ways[number]
            with suppress(BlockingIOError):
                while True:
                    frame, (_, _, kind, *_) = way.source.recvfrom(1 << 16)
                    if kind != _OUTGOING and chance.random() >= way.loss:
                        count += 1
                        heapq.heappush(under_way, (time.monotonic() + way.delay_s, count, way, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, way, frame = heapq.heappop(under_way)
            with suppress(OSError):
                way.target.send(frame)


def _opened(interface: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS))
    opened.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCE, _BUFFER_BYTES)
    opened.bind((interface, 0))
    opened.setblocking(False)
    return opened


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--loss", type=float, default=0.0)
    parser.add_argument("pairs", nargs="+")
    given = parser.parse_args()
    carry([tuple(pair.split(":")) for pair in given.pairs], given.delay_ms / 1000, given.loss)
