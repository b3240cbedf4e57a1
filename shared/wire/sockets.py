"""Byte counters of the operating system: for the network interface, and for the TCP sockets of this process."""

import os
import socket
import struct
import sys
from typing import NamedTuple

import psutil

_BYTES_SENT_AT = 200  # offset in Linux's struct tcp_info, since 4.19


class Counters(NamedTuple):
    """The bytes that an interface has carried since it was created, including headers."""

    sent_bytes: int
    received_bytes: int


def counters() -> Counters | None:
    """Read the counters of the network interface that connects the ranks.

    The interface is the one named by GLOO_SOCKET_IFNAME, or else loopback. A rank on a host of its own has an interface
    to itself; otherwise the counters include all programs on the machine. Returns None if there is no such interface.
    """
    interfaces = psutil.net_io_counters(pernic=True, nowrap=False)  # of the network namespace of the main thread
    found = interfaces.get(os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    return Counters(found.bytes_sent, found.bytes_recv) if found else None


def sent_bytes() -> int | None:
    """Return the bytes sent through the TCP sockets that this process has open now, without headers.

    Unlike `counters`, this includes no other process. Use the difference of two calls. Returns None outside Linux, and
    on kernels that do not report it.
    """
    if not sys.platform.startswith("linux"):
        return None
    total_bytes = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        info = _tcp_info(number)
        if info is None:
            continue
        if len(info) < _BYTES_SENT_AT + 8:
            return None
        total_bytes += struct.unpack_from("Q", info, _BYTES_SENT_AT)[0]
    return total_bytes


def _tcp_info(number: int) -> bytes | None:
    """Read the kernel's TCP information of a file descriptor. Returns None if it is not an open TCP socket."""
    try:
        if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(number)) as same:
            return same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
