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

    The interface is the one named by GLOO_SOCKET_IFNAME, or else loopback. A rank on its own host has its own
    interface; otherwise the counters include all programs on the machine. Returns None if there is no such interface.
    """
    interfaces = psutil.net_io_counters(pernic=True, nowrap=False)  # of the network namespace of the main thread
    interface = interfaces.get(os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    return Counters(interface.bytes_sent, interface.bytes_recv) if interface else None


def sent_bytes() -> int | None:
    """Return the bytes sent through the TCP sockets that this process has open now, without headers.

    Unlike `counters`, this excludes other processes. Use the difference of two calls. Returns None if this is
    not Linux, or if the kernel does not report it.
    """
    if not sys.platform.startswith("linux"):
        return None
    total_bytes = 0
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        info = _tcp_info(descriptor)
        if info is None:
            continue
        if len(info) < _BYTES_SENT_AT + 8:
            return None
        total_bytes += struct.unpack_from("Q", info, _BYTES_SENT_AT)[0]
    return total_bytes


def _tcp_info(descriptor: int) -> bytes | None:
    """Read the kernel's TCP information of a file descriptor. Returns None if it is not an open TCP socket."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
