"""The lines between the kernel and its ranks: who may connect, which call an answer belongs to, what ends a line."""

import os
import pickle
import socket
import time
from multiprocessing.connection import Connection

import psutil
import pytest

from shared import ranks
from shared.deadlines import scaled
from shared.ranks import lines
from shared.ranks.errors import CellFailed

SOON_S = scaled(2.0)


@pytest.fixture
def exchange():
    exchange = lines.Exchange()
    yield exchange
    exchange.close()


def connect(exchange: lines.Exchange, token: bytes) -> Connection:
    """Connect as a rank does."""
    connection = Connection(socket.create_connection(("127.0.0.1", exchange.port), timeout=SOON_S).detach())
    connection.send_bytes(token)
    return connection


@pytest.fixture
def connected(exchange) -> tuple[Connection, lines.Line]:
    """Both ends of the line of a single rank: the rank's and the kernel's."""
    rank = connect(exchange, exchange.invitation(0)[1])
    (line,) = exchange.lines(SOON_S)
    return rank, line


def answer(rank: Connection, value, failed: bool = False) -> None:
    """Answer the oldest call as a rank does."""
    number = rank.recv_bytes()[: lines._NUMBER.size]
    rank.send_bytes(number + pickle.dumps((failed, value)))


def test_only_a_rank_with_its_token_gets_a_line(exchange):
    """Any program on this machine can connect to the port, and the kernel loads the pickles that it receives there."""
    tokens = [exchange.invitation(rank)[1] for rank in range(2)]
    strangers = [connect(exchange, b"x" * len(tokens[0])), connect(exchange, b"too long" * 100)]
    connect(exchange, b"").close()
    silent = Connection(socket.create_connection(("127.0.0.1", exchange.port), timeout=SOON_S).detach())
    other_end = {rank: connect(exchange, tokens[rank]) for rank in (1, 0)}
    found = exchange.lines(2 * SOON_S)
    for rank, line in enumerate(found):
        asked = line.apply_async(print)
        answer(other_end[rank], f"from {rank}")
        assert asked.get(timeout=SOON_S) == f"from {rank}"
    for stranger in [*strangers, silent]:
        with pytest.raises((EOFError, ConnectionError)):
            stranger.recv_bytes()


def test_the_kernel_does_not_wait_for_a_line_without_end(exchange):
    exchange.invitation(0)
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        exchange.lines(timeout_s=0.1)
    assert time.monotonic() - began < SOON_S


def test_a_new_process_gets_a_new_token(exchange):
    """Otherwise, a rank of an earlier start could take the place of a new one."""
    _, old = exchange.invitation(0)
    rank = connect(exchange, old)
    (line,) = exchange.lines(SOON_S)
    _, new = exchange.invitation(0)
    connect(exchange, old)
    rank = connect(exchange, new)
    (again,) = exchange.lines(SOON_S)
    assert not line.works and again.works and exchange.works
    asked = again.apply_async(print)
    answer(rank, "new")
    assert asked.get(timeout=SOON_S) == "new"


def test_a_late_answer_is_not_taken_for_that_of_the_next_call(connected):
    rank, line = connected
    line.apply_async(print)  # Nobody waits for this one any more.
    asked = line.apply_async(print)
    answer(rank, "late")
    assert not asked.wait(0.2)
    answer(rank, "right")
    assert asked.get(timeout=SOON_S) == "right"
    line.apply_async(print)
    asked = line.apply_async(print)
    for value in ("late", "right"):
        answer(rank, value)
    assert asked.get(timeout=SOON_S) == "right", "the late answer has ended the wait"


def test_an_error_of_a_rank_is_raised_with_its_name(connected):
    rank, line = connected
    asked = line.apply_async(print)
    answer(rank, "ValueError: no such rank", failed=True)
    with pytest.raises(lines.RankError, match=r"^ValueError: no such rank$"):
        asked.get(timeout=SOON_S)


HALVES = {
    "between messages": b"",
    "within a message": b"\0\0\0\x10abc",
    "within a number": b"\0\0\0\x03abc",
    "after an impossible length": b"\x80\0\0\0",
    "after a length that no memory has": b"\xff\xff\xff\xff\x40\0\0\0\0\0\0\0",
}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES)
def test_a_line_that_ends_gives_no_answer_and_does_not_hang(exchange, connected, half):
    rank, line = connected
    asked = line.apply_async(print)
    os.write(rank.fileno(), half)
    rank.close()
    began = time.monotonic()
    assert not asked.wait(0.1) and not asked.ready()
    assert time.monotonic() - began < SOON_S
    assert not line.works and not exchange.works
    assert not line.apply_async(print).ready()


def test_a_rank_that_stops_in_the_middle_of_a_message_holds_nobody_up(connected):
    rank, line = connected
    asked = line.apply_async(print)
    content = rank.recv_bytes()[: lines._NUMBER.size] + pickle.dumps((False, "late"))
    message = len(content).to_bytes(4, "big") + content
    began = time.monotonic()
    for byte in message[:-1]:
        os.write(rank.fileno(), bytes([byte]))
        assert not asked.wait(0.001)
    assert time.monotonic() - began < SOON_S
    os.write(rank.fileno(), message[-1:])
    assert asked.get(timeout=SOON_S) == "late"


def test_a_long_message_is_read_and_one_without_bounds_is_not(connected, monkeypatch):
    """The length of a message of 2 GiB or more is sent as 8 bytes. A rank may send a short message like this, too."""
    rank, line = connected
    asked = line.apply_async(print)
    content = rank.recv_bytes()[: lines._NUMBER.size] + pickle.dumps((False, "long"))
    os.write(rank.fileno(), b"\xff\xff\xff\xff" + len(content).to_bytes(8, "big") + content)
    assert asked.get(timeout=SOON_S) == "long"
    monkeypatch.setattr(lines, "_MOST_BYTES", 10)
    asked = line.apply_async(print)
    answer(rank, "more than 10 bytes")
    assert not asked.wait(SOON_S) and not line.works


def cut_the_line(port: int) -> None:
    """Close this rank's end of its line, as code that closes all files would do."""
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            os.close(connection.fd)


@pytest.mark.slow
def test_ranks_are_replaced_after_one_has_cut_its_line(four_ranks):
    current = ranks.current()
    starts = current.starts
    with pytest.raises(CellFailed, match="was stopped after"):
        ranks.run(cut_the_line, current._exchange.port, timeout_s=1.0)
    assert current.starts == starts + 1
    assert ranks.pull("rank") == [0, 1, 2, 3]


def test_large_arguments_and_results_pass_through_a_line(four_ranks):
    """These are larger than the buffers of a connection, and all ranks send at once."""
    sent = os.urandom(20_000_000)
    assert ranks.run(bytes, sent) == [sent] * 4
