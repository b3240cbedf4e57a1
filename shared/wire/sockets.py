"""What the system counts: the bytes of the interface between ranks, and those of this process's own TCP sockets."""

import os
import socket
import struct
import sys
from typing import NamedTuple

import psutil

_BYTES_SENT_AT = 200  # in Linux's struct tcp_info, since 4.19


class Counters(NamedTuple):
    """What an interface has carried since it exists, headers counted."""

    sent_bytes: int
    received_bytes: int


def counters() -> Counters | None:
    """Read the counters of the interface between ranks: on a host its own, else the machine's, for all programs.

    It is the one named by GLOO_SOCKET_IFNAME, or loopback. None where the system has no such interface.
    """
    interfaces = psutil.net_io_counters(pernic=True, nowrap=False)  # of the namespace that the main thread is in
    found = interfaces.get(os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    return Counters(found.bytes_sent, found.bytes_recv) if found else None


def sent_bytes() -> int | None:
    """Add up what left through this process's TCP sockets that are open now, headers apart: nobody else's traffic.

    Take the difference of two calls. None where the system does not tell: it is Linux that does.
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
    """Ask the kernel about one file of this process; None where that is no TCP socket, or closed meanwhile."""
    try:
        if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(number)) as same:
            return same.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
