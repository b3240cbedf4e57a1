"""A control group bounds what a sandbox holds, in both versions of the kernel's interface."""

import subprocess

import pytest

from instructor.grade import cgroup

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
