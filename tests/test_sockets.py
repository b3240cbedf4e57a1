"""The count of a process's own sockets tells what was sent, to the byte."""

import socket

import pytest

from shared.wire import sockets

pytestmark = pytest.mark.skipif(sockets.sent_bytes() is None, reason="this system does not tell")


def _pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        return sender, server.accept()[0]


def test_what_a_socket_sends_is_counted_once():
    sender, receiver = _pair()
    with sender, receiver:
        before_bytes = sockets.sent_bytes()
        sender.sendall(bytes(100_000))
        received = 0
        while received < 100_000:
            received += len(receiver.recv(65536))
        assert sockets.sent_bytes() - before_bytes == 100_000


def test_sockets_that_are_no_tcp_are_passed_over_and_stay_open():
    one, other = socket.socketpair()
    with one, other:
        before_bytes = sockets.sent_bytes()
        one.sendall(b"hello")
        assert other.recv(5) == b"hello"
        assert sockets.sent_bytes() == before_bytes


def test_another_system_is_not_asked(monkeypatch):
    monkeypatch.setattr(sockets.sys, "platform", "darwin")
    assert sockets.sent_bytes() is None
