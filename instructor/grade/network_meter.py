"""Compare the bytes that ranks report with those that the network interface carried, which no rank can change.

This works in a network namespace in which only the kernel and its ranks communicate, such as the sandbox of grading.
There, the interface carries only messages between ranks, control traffic, and requests to the store. The kernel knows
the ports of the last two, and the system counts the bytes of every connection to them. The ranks have sent all other
bytes to each other.
"""

import os
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.checks.engine.candidate import Report
from shared.deadlines import scaled

# With our own solutions, the network carried at most 1,130 bytes per call more than the payload, and at most 1.5% or
# 14,000 bytes less than it.
CALL_BYTES = 2_000
MOST_EXTRA_BYTES, MOST_EXTRA_BYTES_PER_STEP = 2_000_000, 500_000  # Ours send up to 250,000 per step (Parallel3D).
SURE, SLACK_BYTES = 0.95, 30_000

_HEADER_BYTES = 52  # of a segment: IP, and TCP with a timestamp. Linux counts no Ethernet header on loopback.
_QUIET_S, _QUIET_BYTES, _MOST_READS = 0.003, 2_000, 20
# Source of the following numbers: linux/netlink.h, linux/inet_diag.h and the struct tcp_info in linux/tcp.h
_REQUEST, _DUMP, _ERROR, _DONE = 20, 0x301, 2, 3
_INFO, _SOCKET_BYTES, _SENT_AT, _TCP_INFO_BYTES = 2, 72, 200, 216
_SENT_BYTES, _SENT_PACKETS = 8, 9  # columns of /proc/net/dev
_TIME_WAIT, _FIN_WAIT_2 = 6, 5  # states of a connection whose end was closed; in the second, the other end is open
_MESSAGE_AT, _STATE_AT, _ENDS_AT, _USER_AT = 16, 1, 4, 64  # offsets: the last three are from the message's start
_LENGTH_AND_KIND, _ENDS = struct.Struct("=IH"), struct.Struct(">HH")  # The ports are in network byte order.


class Sent(NamedTuple):
    """How many bytes one end of a connection has sent, and how many of these were retransmissions."""

    all_bytes: int
    again_bytes: int
    user: int | None = None  # the user who owns this end; None for a connection that has ended


@dataclass(frozen=True)
class Carried:
    """What an interface has carried, without headers, and what each end of each open connection has sent.

    The key of an end is its own port and the port of the other end.
    """

    payload_bytes: int
    by_end: dict[tuple[int, int], Sent]
    ended: frozenset[tuple[int, int]] = frozenset()  # ends of connections that have closed in the last minute

    def between_others(self, began: "Carried", ports: set[int]) -> int:
        """Return how many bytes the interface has carried since `began`. Retransmitted bytes count only once.

        Bytes to or from these ports do not count, unless a rank has opened the port. Bytes that a rank sent to itself
        do not count either.
        """
        carried_bytes, over_open_bytes = self.payload_bytes - began.payload_bytes, 0
        for ends, sent in self.by_end.items():
            before = began.by_end.get(ends, Sent(0, 0))
            sent_bytes, again_bytes = sent.all_bytes - before.all_bytes, sent.again_bytes - before.again_bytes
            if self.is_ours(ends, ports) or self._stays_with_one_rank(ends):
                carried_bytes -= sent_bytes
            else:
                carried_bytes -= again_bytes
                over_open_bytes += sent_bytes - again_bytes
        # Header sizes are estimates. Their errors add up if code prints a lot, or sends many packets without data.
        return max(carried_bytes, over_open_bytes)

    def is_ours(self, ends: tuple[int, int], ports: set[int]) -> bool:
        """Return whether a connection has one of these ports at an end, unless a rank has opened that port."""
        at_ports = [each for each in (ends, _from_there(ends)) if each[0] in ports]
        owners = {self.by_end[each].user for each in at_ports if each in self.by_end}
        return bool(at_ports) and owners <= {None, 0, os.getuid()}

    def _stays_with_one_rank(self, ends: tuple[int, int]) -> bool:
        """Return whether both ends belong to one rank, which sends nothing to other ranks in this way.

        If ranks do not have users of their own, this is unknown, and the result is False.
        """
        one, other = self.by_end[ends], self.by_end.get(_from_there(ends))
        return other is not None and one.user == other.user and one.user not in (None, os.getuid())


def _from_there(ends: tuple[int, int]) -> tuple[int, int]:
    """Return the ends of a connection as its other end sees them."""
    return ends[1], ends[0]


class Meter:
    """Measures from outside how many bytes ranks send to each other.

    Args:
        ranks: Returns the set of ranks, which knows the port of its lines and those of its store.
        announced_ports: Returns the ports that the ranks' process groups announced, and those from which gates pass
            ranks' requests on to the store. Returns None if these ports are unknown.
    """

    def __init__(self, ranks, announced_ports=lambda: None):
        self._ranks, self._announced_ports = ranks, announced_ports
        self.found_others = False  # whether the ranks ever had connections that belong to no process group
        self._ended: tuple[int, Carried] | None = None  # the generation and the counters when a measurement ended
        self.begin()

    def begin(self) -> None:
        """Begin a measurement where the last one ended, unless the ranks have formed a new process group since then."""
        if self._ended is None:
            _settle()
        is_continued = self._ended and self._ended[0] == self._ranks().generation
        self._began = self._ended[1] if self._ended and is_continued else read()
        self._ended = None

    def contradicts(self, reports: Sequence[Report], steps: int = 0) -> str:
        """Return what is wrong if the network has carried less or more between the ranks than they report, or "".

        With each message, gloo sends another one that describes it. For small messages, this is most of the bytes.
        Inside, gloo's reduce-scatter is an all-reduce, which sends twice as much.

        Args:
            reports: What each rank reports about itself.
            steps: The number of training steps or repeated calls, if it was drawn. The more of them, the more extra
                bytes are credible. Without a limit, code could report calls that it did not make, and send other data
                instead.
        """
        now = self._now()
        if others := self._others_that_stay(now):
            self.found_others = True
            return f"the ranks have {len(others)} connections that belong to no process group"
        between_bytes = self._between(now)
        sent_bytes, scattered_bytes, calls = map(sum, zip(*reports, strict=True))
        extra_bytes = min(calls * CALL_BYTES, MOST_EXTRA_BYTES + steps * MOST_EXTRA_BYTES_PER_STEP)
        most_bytes = sent_bytes + min(scattered_bytes, sent_bytes) + extra_bytes
        if SURE * sent_bytes - SLACK_BYTES <= between_bytes <= most_bytes / SURE + SLACK_BYTES:
            return ""
        only = "only " if between_bytes < sent_bytes else ""
        return (
            f"the ranks report {sent_bytes / 1e6:.2f} MB that they sent in collectives, "
            f"but the network carried {only}{between_bytes / 1e6:.2f} MB between them"
        )

    def _others_that_stay(self, now: Carried) -> list[tuple[int, int]]:
        """Return what `_others` returns, after waiting until the connections of earlier ranks have closed.

        Once such connections have been found, the exercise is void, so there is nothing to wait for.
        """
        others, deadline = self._others(now), time.monotonic() + scaled(30.0)
        known = self._began.by_end.keys()
        while others and not self.found_others and known >= {*others} and time.monotonic() < deadline:
            time.sleep(0.1)
            others = self._others(read())
        return others

    def _others(self, now: Carried) -> list[tuple[int, int]]:
        """Return the ends of connections between ranks that the course has not made."""
        announced = self._announced_ports()
        if announced is None:
            return []
        ranks = self._ranks()
        known = {ranks.store_ports[-1], *announced}
        users = {ends: sent.user for ends, sent in now.by_end.items()}
        # A rank may connect to itself. Both ends of a connection to the store's own port belong to the
        # judge, because ranks are given another port.
        between = {
            ends
            for ends, user in users.items()
            if users.get(_from_there(ends)) != user and not now.is_ours(ends, {ranks.control_port})
        }
        before = self._began.ended | self._began.by_end.keys()
        return [ends for ends in between | (now.ended - before) if known.isdisjoint(ends)]

    def _now(self) -> Carried:
        _settle()
        now = read()
        self._ended = self._ranks().generation, now
        return now

    def _between(self, now: Carried) -> int:
        ranks = self._ranks()
        return now.between_others(self._began, {ranks.control_port, *ranks.store_ports})


def available() -> bool:
    """Return whether this system counts the bytes of an interface and of each connection."""
    try:
        read()
    except (OSError, AttributeError, StopIteration):
        return False
    return True


def read() -> Carried:
    """Read the counters of the loopback interface and of all TCP connections over it.

    Raises:
        OSError: if this system does not count them.
    """
    for _ in range(_MOST_READS):
        before, (by_end, ended), after = _interface(), _by_end(), _interface()
        if before == after:  # Otherwise, something was sent while the connections were listed.
            break
    return Carried(after, by_end, ended)


def _interface() -> int:
    """Return how many bytes the loopback interface has carried, without headers.

    The package `psutil` would take ten times as long.
    """
    with open("/proc/net/dev", encoding="utf-8", errors="replace") as file:
        fields = next(line for line in file if line.lstrip().startswith("lo:")).split(":")[1].split()
    return int(fields[_SENT_BYTES]) - _HEADER_BYTES * int(fields[_SENT_PACKETS])


def _by_end() -> tuple[dict[tuple[int, int], Sent], frozenset[tuple[int, int]]]:
    """Return what each end of each connection has sent, and the ends of those that have ended."""
    found: dict[tuple[int, int], Sent] = {}
    ended: set[tuple[int, int]] = set()
    for family in (socket.AF_INET, socket.AF_INET6):
        with _listing(family) as netlink:
            while not _note(netlink.recv(1 << 18), found, ended):
                pass
    return found, frozenset(ended)


def _listing(family: int) -> socket.socket:
    """Ask the system to describe all TCP connections in this network namespace. Returns the socket with the answers."""
    netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, getattr(socket, "NETLINK_SOCK_DIAG", 4))
    netlink.settimeout(scaled(5.0))
    request = struct.pack("=BBBxI", family, socket.IPPROTO_TCP, 1 << _INFO - 1, 0xFFFFFFFF) + bytes(48)
    netlink.send(struct.pack("=IHHII", _MESSAGE_AT + len(request), _REQUEST, _DUMP, 1, 0) + request)
    return netlink


def _note(answers: bytes, found: dict[tuple[int, int], Sent], ended: set[tuple[int, int]]) -> bool:
    """Add the connections that these answers describe to `found` and `ended`. Returns whether the list is complete."""
    at = 0
    while at < len(answers):
        length, kind = _LENGTH_AND_KIND.unpack_from(answers, at)
        if kind == _DONE:
            return True
        socket_at = at + _MESSAGE_AT
        if kind == _ERROR:
            (number,) = struct.unpack_from("=i", answers, socket_at)
            raise OSError(f"the system does not list connections: error {number}")
        ends = _ENDS.unpack_from(answers, socket_at + _ENDS_AT)
        state = answers[socket_at + _STATE_AT]
        # There may be hundreds in TIME_WAIT.
        sent = None if state == _TIME_WAIT else _sent(answers, socket_at, at + length)
        if ends[1] and sent:
            found[ends] = sent
        elif state in (_TIME_WAIT, _FIN_WAIT_2):
            ended.add(ends)
        at += length + 3 & ~3
    return False


def _sent(data: bytes, socket_at: int, end: int) -> Sent | None:
    """Return what one end of a connection has sent, or None if the system does not say."""
    (user,) = struct.unpack_from("=I", data, socket_at + _USER_AT)
    at = socket_at + _SOCKET_BYTES
    while at + 4 <= end:
        length, kind = struct.unpack_from("=HH", data, at)
        if kind == _INFO and length >= 4 + _TCP_INFO_BYTES:
            return Sent(*struct.unpack_from("=QQ", data, at + 4 + _SENT_AT), user)
        at += max(4, length + 3 & ~3)
    return None


def _settle() -> None:
    """Wait until the interface is quiet. Others may still be sending after this process has received all answers."""
    deadline = time.monotonic() + scaled(2.0)
    carried = _interface()
    while time.monotonic() < deadline:
        time.sleep(_QUIET_S)
        before, carried = carried, _interface()
        if abs(carried - before) < _QUIET_BYTES:
            return
