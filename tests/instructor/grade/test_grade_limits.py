"""What bounds the ranks: a gate in front of the process group's store, and a control group for each sandbox."""

import contextlib
import struct
import subprocess
from datetime import timedelta

import pytest
import torch.distributed as dist

from instructor.grade import cgroup, store_proxy

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


V1_STAT = "cache 5\nrss 7\ntotal_cache 500\ntotal_rss 70\ntotal_shmem 9\n"
HOLD = """
import mmap, sys
held = mmap.mmap(-1, 50_000_000)
held.write(b"x" * 50_000_000)
print(1, flush=True)
sys.stdin.read()
"""
V2_STAT = "anon 70\nfile 500\nkernel 4\nshmem 9\n"


def hierarchy(folder, files: dict[str, str], own: str):
    """Return a root and a list of the grader's own groups, as the system shows them."""
    (folder / "root").mkdir()
    (folder / "own").write_text(own)
    for name, text in files.items():
        path = folder / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "root", folder / "own"


def test_version_2_is_read_and_limited(tmp_path):
    group = cgroup.Group(tmp_path, cgroup.V2)
    for name in ("memory.max", "memory.swap.max", "pids.max"):
        (tmp_path / name).write_text("max")
    (tmp_path / "memory.stat").write_text(V2_STAT)
    group.limit(1000, 20)
    assert [(tmp_path / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")] == [
        "1100",
        "0",
        "40",
    ]
    assert group.held_bytes() == 83
    for kills, has_run_out in ((0, False), (2, True)):
        (tmp_path / "memory.events").write_text(f"max 7\noom 3\noom_kill {kills}\n")
        assert group.has_run_out() is has_run_out


def test_version_1_is_read_and_limited(tmp_path):
    group = cgroup.Group(tmp_path, cgroup.V1)
    (tmp_path / "memory.stat").write_text(V1_STAT)
    (tmp_path / "memory.kmem.usage_in_bytes").write_text("4\n")
    group.limit(1000, 20)
    assert (tmp_path / "memory.limit_in_bytes").read_text() == "1100"
    assert group.held_bytes() == 83
    for kills, has_run_out in ((0, False), (1, True)):
        (tmp_path / "memory.oom_control").write_text(f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        assert group.has_run_out() is has_run_out


def test_places_go_from_the_own_group_to_the_root_and_skip_other_controllers(tmp_path):
    root, own = hierarchy(tmp_path, {}, "4:memory:/a/b\n3:cpu:/a\n0::/c\n")
    found = [(folder.relative_to(root).as_posix(), names) for folder, names in cgroup._places(root, own)]
    v1, v2 = cgroup.V1, cgroup.V2
    assert found == [("memory/a/b", v1), ("memory/a", v1), ("memory", v1), ("c", v2), (".", v2)]


def test_a_folder_without_a_limit_is_not_used(tmp_path):
    root, own = hierarchy(tmp_path, {}, "0::/\n")
    assert cgroup.create("grade-1", root, own) is None
    assert list(root.iterdir()) == []


def test_no_groups_at_all(tmp_path):
    assert cgroup.create("grade-1", tmp_path, tmp_path / "missing") is None


def test_detached_shared_memory_is_counted_here():
    group = cgroup.create("grade-test")
    if group is None:
        pytest.skip("the grader may not create a control group on this system")
    enter = ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.folder / "cgroup.procs"), "python3", "-c", HOLD]
    try:
        group.limit(500_000_000, 20)
        with subprocess.Popen(enter, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"1\n"
            assert 50e6 < group.held_bytes() < 150e6
            process.stdin.close()
    finally:
        group.remove()
    assert not group.folder.exists()


@pytest.mark.parametrize(
    ("own", "files", "limit_bytes"),
    [
        ("0::/a/b\n", {"a/memory.max": "900\n", "a/b/memory.max": "max\n"}, 900),
        ("0::/\n", {"memory.max": "700\n"}, 700),
        ("0::/../x\n", {"memory.max": "700\n"}, 700),
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": "800\n"}, 800),
        ("4:memory:/\n", {"memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_a_container_learns_its_own_limit(tmp_path, own, files, limit_bytes):
    assert cgroup.limit_bytes(*hierarchy(tmp_path, files, own)) == limit_bytes
