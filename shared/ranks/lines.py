"""Connect the kernel directly to each rank, for calls and their results.

A line is one TCP connection between the kernel and one rank. On two cores of an AMD EPYC, calling an empty function on
four ranks takes 1 ms, and 2 ms of CPU time.
"""

import contextlib
import hmac
import os
import pickle
import secrets
import signal
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

from shared.deadlines import scaled
from shared.ranks import calls

_STALLED_AFTER_S = scaled(60.0)  # how long one end waits to receive the rest of a message, or to send it
_TOKEN_WITHIN_S = scaled(1.0)  # Each rank sends its token before the kernel waits for it.
_LOOKS_EVERY_S = 0.02
_NUMBER = struct.Struct("=Q")
_TOKEN_BYTES = 32
# Before each message, Connection sends its length. For a long message, it sends −1 and then a length of 8 bytes.
_SHORT, _LONG = struct.Struct("!i"), struct.Struct("!Q")
_MOST_BYTES = 4 * 2**30  # of an answer


class RankError(Exception):
    """An error that was raised on a rank, outside a student's code. Its message begins with the class of the error."""


class Exchange:
    """The kernel's end of all lines.

    A rank connects to `port` and sends the token that it was given, so that no other program can take its place.
    """

    def __init__(self):
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._tokens: dict[int, bytes] = {}
        self._lines: dict[int, Line] = {}

    @property
    def works(self) -> bool:
        """Whether all lines work."""
        return all(line.works for line in self._lines.values())

    def invitation(self, rank: int) -> tuple[int, bytes]:
        """Return what a new process needs in order to connect as this rank: the port and a token."""
        self._tokens[rank] = secrets.token_bytes(_TOKEN_BYTES)
        return self.port, self._tokens[rank]

    def lines(self, timeout_s: float, watch: Callable[[int], None] = lambda connected: None) -> list["Line"]:
        """Close the earlier lines, accept those of all invited ranks, and return these in rank order.

        Args:
            watch: Called again and again with the number of ranks that have connected. It may raise an error.

        Raises:
            TimeoutError: If a rank does not connect within timeout_s.
        """
        self._hang_up()
        self._server.settimeout(_LOOKS_EVERY_S)
        deadline = time.monotonic() + timeout_s
        while len(self._lines) < len(self._tokens):
            watch(len(self._lines))
            try:
                accepted, _ = self._server.accept()
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                answered = f"Only {len(self._lines)} of {len(self._tokens)} ranks answered"
                raise TimeoutError(f"{answered} within {timeout_s:g} s.") from None
            line = Line(_connection(accepted))
            rank = self._rank_of(line)
            if rank is None:
                line.close()
            else:
                self._lines[rank] = line
        return [self._lines[rank] for rank in sorted(self._lines)]

    def _rank_of(self, line: "Line") -> int | None:
        """Return the rank whose token was sent over a line, or None if no rank's token was sent in time."""
        try:
            if not line.connection.poll(_TOKEN_WITHIN_S):
                return None
            shown = line.connection.recv_bytes(_TOKEN_BYTES)
        except (OSError, EOFError):
            return None
        return next((rank for rank, token in self._tokens.items() if hmac.compare_digest(token, shown)), None)

    def _hang_up(self) -> None:
        for line in self._lines.values():
            line.close()
        self._lines = {}

    def close(self) -> None:
        """End all lines."""
        self._hang_up()
        self._server.close()


class Line:
    """The kernel's end of the connection to one rank."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self._unread = bytearray()  # what has arrived of the next answer
        self.works = True  # False once the connection has ended, or a message was incomplete or invalid

    def apply_async(self, fn, *args) -> "Answer":
        """Ask the rank to call fn(*args), and return at once."""
        number = secrets.randbits(64)  # It is random, so code on a rank cannot answer a call before receiving it.
        packed = calls.pack(fn, args)
        try:
            self.connection.send_bytes(_NUMBER.pack(number) + packed)
        except OSError:  # The process has ended, or does not read, so there will be no answer.
            self.works = False
        return Answer(self, number)

    def receive(self, timeout_s: float) -> tuple[int, bytes] | None:
        """Return the next answer's number and its content, or None if there is no answer within timeout_s."""
        deadline = time.monotonic() + timeout_s
        try:
            while self.works:
                if (received := self._next_message()) is not None:
                    return *_NUMBER.unpack_from(received), received[_NUMBER.size :]
                if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                    return None
                self._read()
        except (OSError, EOFError, ValueError, MemoryError, struct.error):  # A rank may send anything.
            self.works = False
        time.sleep(max(0.0, deadline - time.monotonic()))  # Otherwise, a caller that polls would keep a core busy.
        return None

    def _read(self) -> None:
        """Read what has arrived, even if it is only a part of an answer. A rank may never send the rest."""
        chunk = os.read(self.connection.fileno(), 2**20)
        if not chunk:
            raise EOFError
        self._unread += chunk

    def _next_message(self) -> bytes | None:
        """Take the next message from what has arrived. Returns None if it is not complete yet."""
        if len(self._unread) < _SHORT.size:
            return None
        (length,), begins = _SHORT.unpack_from(self._unread), _SHORT.size
        if length == -1:
            if len(self._unread) < _SHORT.size + _LONG.size:
                return None
            (length,), begins = _LONG.unpack_from(self._unread, begins), begins + _LONG.size
        if not 0 <= length <= _MOST_BYTES:
            raise ValueError(f"a message of {length} bytes")
        if len(self._unread) < begins + length:
            return None
        with memoryview(self._unread) as view:
            message = bytes(view[begins : begins + length])
        del self._unread[: begins + length]
        return message

    def close(self) -> None:
        self.works = False
        self.connection.close()


class Answer:
    """A rank's answer to one call. The rank may not have answered yet."""

    def __init__(self, line: Line, number: int):
        self._line, self._number = line, number
        self._content: bytes | None = None

    def wait(self, timeout_s: float) -> bool:
        """Wait at most timeout_s. Returns whether the answer has been received."""
        deadline = time.monotonic() + timeout_s
        while self._content is None and (received := self._line.receive(max(0.0, deadline - time.monotonic()))):
            number, content = received
            if number == self._number:  # Otherwise, this answers an earlier call that nobody waits for.
                self._content = content
        return self._content is not None

    def ready(self) -> bool:
        """Return whether the answer has been received."""
        return self.wait(0.0)

    def get(self, timeout: float = 0.0):
        """Return what the function returned.

        Raises:
            TimeoutError: If the answer is not received within `timeout` seconds.
            RankError: If the function raised an error, or its result cannot be pickled.
        """
        if not self.wait(timeout) or self._content is None:
            raise TimeoutError(f"the rank has not answered within {timeout:g} s")
        failed, value = pickle.loads(self._content)
        if failed:
            raise RankError(value)
        return value


def answer_calls(port: int, token: bytes) -> None:
    """Connect this rank to the kernel and answer its calls, one at a time. Never returns."""
    connection = _connection(socket.create_connection(("127.0.0.1", port), timeout=_STALLED_AFTER_S))
    process = os.getpid()
    with contextlib.suppress(OSError, EOFError):  # The line has ended or stalled, so it cannot be used any more.
        connection.send_bytes(token)
        while connection.poll(None):
            received = connection.recv_bytes()
            answer = _called(received[_NUMBER.size :])
            if os.getpid() != process:  # The call has forked, and the line belongs to the parent.
                os._exit(0)
            connection.send_bytes(received[: _NUMBER.size] + answer)
    while True:  # until the kernel, which notices the lost line, ends this process
        signal.pause()


def _called(request: bytes) -> bytes:
    """Call the function in a request. Returns the pickled answer."""
    try:
        fn, args = calls.unpack(request)
        return pickle.dumps((False, fn(*args)), pickle.HIGHEST_PROTOCOL)
    except BaseException as error:  # including SystemExit and KeyboardInterrupt, because a rank must outlive its calls
        return pickle.dumps((True, f"{type(error).__name__}: {error}"))


def _connection(connected: socket.socket) -> Connection:
    """Return a connection that sends each message at once, and fails if the other end stalls for too long."""
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds, fraction = divmod(_STALLED_AFTER_S, 1.0)
    deadline = struct.pack("@ll", int(seconds), int(fraction * 1e6))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, deadline)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, deadline)
    return Connection(connected.detach())
