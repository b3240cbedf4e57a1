"""Pass on to the process group's store only the requests that the groups themselves need.

The store holds the addresses at which ranks find each other. Code could also use it to pass values from rank to rank
without any collective. So ranks connect to a gate, which reads their requests and rejects unknown keys, long values,
and requests that no process group makes.
"""

import contextlib
import re
import selectors
import socket
import struct
import threading
from collections import Counter
from dataclasses import dataclass, field

from shared.deadlines import scaled
from shared.ranks import processes

CHUNK_BYTES = 1 << 16
MOST_CONNECTIONS = 100  # Our solutions have about 12.
MOST_KEY_BYTES, MOST_KEYS, MOST_VALUE_BYTES = 500, 100, 20_000
# How many keys of one kind may be written, in a generation or overall. Without a limit, their names or their values
# could contain the gradients of a large model. Our solutions write about 300 addresses in a generation (lab 18, which
# forms many groups), and 30 marks.
MOST_ADDRESSES, MOST_MARKS, MOST_ALARMS = 500, 500, 1000
# Source: QueryType in TCPStoreBackend.hpp of torch 2.13. Each request is a byte, followed by the parts named here.
REQUESTS = {
    0: ("validate", "number"),
    1: ("set", "key value"),
    3: ("get", "key"),
    5: ("check", "keys"),
    6: ("wait", "keys"),
    13: ("ping", "number"),
}
NUMBER_BYTES = 4
# A rank announces where it can be reached: the address of a socket over IPv4 or IPv6, which begins with its port.
ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01|\x0a\x00(..)\x00{4}\x00{15}\x01", re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """What ranks may do with some of the keys."""

    keys: re.Pattern
    requests: tuple[str, ...]
    most_bytes: int = 0  # of a value
    words: tuple[bytes, ...] = ()  # the only possible values; all if empty
    most_keys: int = 10**9  # that are written, per value of the pattern's group `of`
    again: bool = False  # whether a key may be written again, which counts as another key


RULES = (
    Rule(re.compile(r"/asked|/ask/\d+"), ("get", "check", "wait")),  # The doctor asks, and each rank answers.
    Rule(re.compile(r"/answer/\d+/\d+"), ("set",), MOST_VALUE_BYTES),  # No rank may read it.
    # The address of a rank for each other rank of a group. It is written once.
    Rule(
        re.compile(r"/generation(?P<of>\d+)/\d+//((\d+|[0-9a-f]{40})//)?cpu//\d\d?/\d\d?"),
        ("set", "get", "check", "wait"),
        400,
        most_keys=MOST_ADDRESSES,
    ),
    # What a guard of a wrapper tells the other ranks, when their models differ or one of them has found a problem.
    Rule(
        re.compile(r"/generation(?P<of>\d+)/\d+//guards/\d+(/\d\d?)?"),
        ("set", "get", "check", "wait"),
        MOST_VALUE_BYTES,
        most_keys=MOST_ALARMS,
        again=True,
    ),
    # Marks of meetings, in which a check sees which ranks have arrived. Several ranks may set the same mark.
    Rule(
        re.compile(r"/[a-z]+\d+/(\d+/)?\w+(?P<of>)"),
        ("set", "check"),
        10,
        (b"arrived", b"written", b"yes"),
        most_keys=MOST_MARKS,
    ),
)


def rule_for(key: str) -> Rule | None:
    """Return the rule for a key, or None if no process group uses such a key."""
    return next((rule for rule in RULES if rule.keys.fullmatch(key)), None)


class Refused(Exception):
    """A request that no process group makes; the message says which."""


class Incomplete(Exception):
    """The rest of a request has not arrived yet."""


@dataclass
class Request:
    """A request that has arrived, perhaps not completely."""

    data: bytes
    at: int = 0
    name: str = ""
    keys: list[str] = field(default_factory=list)
    value: bytes = b""

    def read(self) -> None:
        """Read all parts.

        Raises:
            Incomplete: if its end is missing.
            Refused: if no process group makes such a request.
        """
        kind = self._take(1)[0]
        if kind not in REQUESTS:
            raise Refused(f"request {kind}")
        self.name, parts = REQUESTS[kind]
        for part in parts.split():
            if part == "number":
                self._take(NUMBER_BYTES)
            elif part == "value":
                self.value = self._text(MOST_VALUE_BYTES, "value")
            else:
                count = self._length(MOST_KEYS, "keys") if part == "keys" else 1
                self.keys = [self._text(MOST_KEY_BYTES, "key").decode(errors="replace") for _ in range(count)]
        for key in self.keys:
            rule = rule_for(key)
            if rule is None or self.name not in rule.requests:
                raise Refused(f"{self.name} of {key!r}")
            if len(self.value) > rule.most_bytes or (self.value and rule.words and self.value not in rule.words):
                raise Refused(f"{self.name} of {key!r} with a value of {len(self.value):,} bytes")

    def _take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise Incomplete
        self.at += count
        return self.data[self.at - count : self.at]

    def _length(self, most: int, what: str) -> int:
        (length,) = struct.unpack("=Q", self._take(8))
        if length > most:
            raise Refused(f"{self.name} with a {what} of {length:,} bytes" if what != "keys" else f"{length:,} keys")
        return length

    def _text(self, most_bytes: int, what: str) -> bytes:
        return self._take(self._length(most_bytes, what))


@dataclass
class Side:
    """One end of a connection, what has arrived there, and the other end."""

    connection: socket.socket
    other: socket.socket
    from_rank: bool
    arrived: bytes = b""


@dataclass
class Gate:
    """Passes requests on to the store at `store_port`, and collects what it has rejected."""

    store_port: int
    refused: list[str] = field(default_factory=list)
    written: set[str] = field(default_factory=set)  # keys that have a value
    announced_ports: set[int] = field(default_factory=set)  # at which ranks said that their group can reach them
    own_ports: set[int] = field(default_factory=set)  # from which this gate connects to the store
    counts: Counter = field(default_factory=Counter)  # of these keys, by rule and the group `of` of its pattern

    def __post_init__(self):
        self._server = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        threading.Thread(target=self._serve, daemon=True, name="gate").start()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    self._accept()
                else:
                    self._pass_on(key.data)

    def _accept(self) -> None:
        rank, _ = self._server.accept()
        if len(self._selector.get_map()) > 2 * MOST_CONNECTIONS:
            self.refused.append(f"more than {MOST_CONNECTIONS} connections")
            return rank.close()
        store = socket.create_connection(("127.0.0.1", self.store_port), timeout=scaled(10))
        store.settimeout(None)
        self.own_ports.add(store.getsockname()[1])
        for side in (Side(rank, store, True), Side(store, rank, False)):
            side.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(side.connection, selectors.EVENT_READ, side)

    def _pass_on(self, side: Side) -> None:
        try:
            chunk = side.connection.recv(CHUNK_BYTES)
            if not chunk:
                raise ConnectionError
            side.arrived += chunk
            with contextlib.suppress(Incomplete):
                while side.arrived:
                    count = self._checked(side.arrived) if side.from_rank else len(side.arrived)
                    side.other.sendall(side.arrived[:count])
                    side.arrived = side.arrived[count:]
        except Refused as error:
            self.refused.append(str(error))
            self._close(side)
        except OSError:
            self._close(side)

    def _checked(self, arrived: bytes) -> int:
        """Return the bytes of the first request that has arrived."""
        request = Request(arrived)
        request.read()
        if request.name == "set":
            self._note_written(*request.keys)
            self.announced_ports |= {int.from_bytes(a or b, "big") for a, b in ADDRESS.findall(request.value)}
        return request.at

    def _note_written(self, key: str) -> None:
        rule = rule_for(key)
        match = rule and rule.keys.fullmatch(key)
        if not rule or not match:
            raise Refused(f"set of {key!r}")
        if key in self.written and rule.words:
            return
        if key in self.written and not rule.again:
            raise Refused(f"another set of {key!r}")
        kind = rule, match.groupdict().get("of")
        self.counts[kind] += 1
        if self.counts[kind] > rule.most_keys:
            raise Refused(f"set of {key!r}, after {rule.most_keys} such keys")
        self.written.add(key)

    def _close(self, side: Side) -> None:
        for connection in (side.connection, side.other):
            with contextlib.suppress(KeyError, ValueError):  # It was closed with its other side.
                self._selector.unregister(connection)
            connection.close()


def install() -> list[Gate]:
    """Put a gate in front of the store of all ranks that are started from now on. Returns the list of gates."""
    gates: list[Gate] = []

    def port_for_ranks(store_port: int) -> int:
        gates.append(Gate(store_port))
        return gates[-1].port

    processes.surroundings.port_for_ranks = port_for_ranks
    return gates
