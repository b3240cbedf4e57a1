"""The byte count of a process's own sockets is exact."""

import socket

import pytest

from shared.wire import sockets

pytestmark = pytest.mark.skipif(sockets.sent_bytes() is None, reason="this system does not report the bytes of sockets")


def _pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        return sender, server.accept()[0]


def test_sent_bytes_are_counted_once():
    sender, receiver = _pair()
    with sender, receiver:
        before_bytes = sockets.sent_bytes()
        sender.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(receiver.recv(65536))
        assert sockets.sent_bytes() - before_bytes == 100_000


def test_sockets_other_than_tcp_are_skipped_and_stay_open():
    one, other = socket.socketpair()
    with one, other:
        before_bytes = sockets.sent_bytes()
        one.sendall(b"hello")
        assert other.recv(5) == b"hello"
        assert sockets.sent_bytes() == before_bytes


def test_other_systems_have_no_count(monkeypatch):
    monkeypatch.setattr(sockets.sys, "platform", "darwin")
    assert sockets.sent_bytes() is None
