"""The gate in front of the process group's store lets groups form, and refuses everything else."""

import contextlib
import struct
from datetime import timedelta

import pytest
import torch.distributed as dist

from instructor.grade import store_proxy

OWN = "generation1/0//cpu//0/1"


@pytest.fixture
def gated():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, store_proxy.Gate(store.port)


def client(gated) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", gated[1].port, is_master=False, wait_for_workers=False)


def text(value: bytes) -> bytes:
    return struct.pack("=Q", len(value)) + value


def test_a_group_can_write_read_and_wait(gated):
    store, port_for_ranks = gated
    one, other = client(gated), client(gated)
    one.set(OWN, "an address")
    other.wait([OWN], timedelta(seconds=20))
    assert other.get(OWN) == b"an address" and store.get(OWN) == b"an address"
    assert other.check([OWN]) and not other.check(["generation1/0//cpu//1/0"])
    assert port_for_ranks.refused == []


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda store: store.set("gradient", "1.5"), "set of '/gradient'"),
        (lambda store: store.set(OWN, "x" * 500), f"set of '/{OWN}' with a value of 500 bytes"),
        (lambda store: store.set(OWN, "x" * 50_000), "set with a value of 50,000 bytes"),
        (lambda store: store.set("late5/1", "1.5"), "set of '/late5/1' with a value of 3 bytes"),
        (lambda store: store.get("answer/1/0"), "wait of '/answer/1/0'"),
        (lambda store: store.add("generation1/steps", 5), "request 4"),
        (lambda store: store.get("gradient"), "wait of '/gradient'"),
        (lambda store: store.append(OWN, "x"), "request 9"),
        (lambda store: store.num_keys(), "request 7"),
        (lambda store: store.multi_set([OWN], ["x"]), "request 11"),
    ],
)
def test_everything_else_is_refused_and_named(gated, use, what):
    rank = client(gated)
    with contextlib.suppress(RuntimeError, dist.DistError):  # The store does not answer a `set`.
        use(rank)
    with pytest.raises((RuntimeError, dist.DistError)):
        rank.check([OWN])
    assert gated[1].refused == [what]
    assert not gated[0].check(["gradient"])
    client(gated).set(OWN, "still open for others")


def test_an_address_is_written_once(gated):
    rank = client(gated)
    rank.set(OWN, "an address")
    rank.set(OWN, "a value")
    with pytest.raises((RuntimeError, dist.DistError)):
        rank.check([OWN])
    assert gated[1].refused == [f"another set of '/{OWN}'"] and gated[0].get(OWN) == b"an address"


def test_several_ranks_may_set_the_same_mark(gated):
    for rank in (client(gated), client(gated)):
        rank.set("renamed5/back", "yes")
    assert client(gated).check(["renamed5/back"]) and gated[1].refused == []


def test_a_guard_can_tell_the_other_ranks_what_is_wrong_more_than_once(gated):
    """The guards of lab 03's wrapper once made its exercise void."""
    rank, other = client(gated), client(gated)
    for problem in ("models differ", "layer.weight has a graph"):
        rank.set("generation3/0//guards/1335706440/1", problem)
        assert other.get("generation3/0//guards/1335706440/1").decode() == problem
    assert gated[1].refused == []


@pytest.mark.parametrize(
    ("key", "value", "most"),
    [
        ("generation7/0//{}//cpu//0/1", "x", store_proxy.MOST_ADDRESSES),
        ("late{}/1", "arrived", store_proxy.MOST_MARKS),
        ("generation7/0//guards/{}", "x", store_proxy.MOST_ALARMS),
    ],
)
def test_keys_that_are_allowed_cannot_carry_much(gated, key, value, most):
    rank = client(gated)
    for number in range(most):
        rank.set(key.format(number), value)
    assert rank.check([key.format(most - 1)]) and gated[1].refused == []
    rank.set(key.format(most), value)
    with pytest.raises((RuntimeError, dist.DistError)):
        rank.check([key.format(0)])
    assert gated[1].refused == [f"set of '/{key.format(most)}', after {most} such keys"]


def test_a_request_is_read_only_when_it_is_complete():
    whole = bytes([1]) + text(f"/{OWN}".encode()) + text(b"an address")
    for count in range(len(whole)):
        with pytest.raises(store_proxy.Incomplete):
            store_proxy.Request(whole[:count]).read()
    request = store_proxy.Request(whole + whole)
    request.read()
    assert (request.at, request.name, request.value) == (len(whole), "set", b"an address")


def test_a_length_that_never_ends_is_refused():
    for request in (bytes([1]) + struct.pack("=Q", 2**60), bytes([6]) + struct.pack("=Q", 2**60)):
        with pytest.raises(store_proxy.Refused):
            store_proxy.Request(request).read()
