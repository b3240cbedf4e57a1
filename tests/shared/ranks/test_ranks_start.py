"""Ranks start whatever lies beside the notebook, and whatever the machine's environment, or say at once why not."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import psutil
import pytest

from shared import ranks
from shared.deadlines import scaled
from shared.ranks import containers, devices, folders, fork_client, processes, rankside

ROOT = Path(__file__).resolve().parents[3]
START = f"""
import contextlib, io, json, random, sys
sys.path.insert(0, {str(ROOT)!r})
from shared import ranks
with contextlib.redirect_stdout(io.StringIO()):
    ranks.start(2)
"""


def run_beside(folder: Path, program: str, **variables) -> str:
    """Run a program with ranks in a folder, as a notebook there would. Returns what it prints."""
    path = folder.parent / "program.py"  # not in the folder, because the kernel itself does not put it first either
    path.write_text(START + program)
    done = subprocess.run(
        [sys.executable, path],
        cwd=folder,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=scaled(120),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_students_file_named_like_a_module_does_not_replace_it_while_ranks_start(tmp_path):
    beside = tmp_path / "labs"
    beside.mkdir()
    for name in ("random", "stringprep", "torch"):
        (beside / f"{name}.py").write_text("print('{')\nraise ImportError('this is the student’s file')\n")
    (beside / "my_helper.py").write_text("def answer():\n    return 42\n")
    program = """
def look():
    import os, my_helper
    return my_helper.answer(), os.getcwd()
print(json.dumps(ranks.run(look)))
"""
    assert json.loads(run_beside(beside, program)) == [[42, str(beside)]] * 2


@pytest.mark.slow
def test_what_a_site_prints_while_python_starts_is_ignored(tmp_path):
    (tmp_path / "labs").mkdir()
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os; os.write(1, b'{}\\n7\\n'); print('[1]', end='')")
    program = "print('\\n' + json.dumps(ranks.run(lambda: 1)))"
    assert run_beside(tmp_path / "labs", program, PYTHONPATH=str(site)).splitlines()[-1] == "[1, 1]"


def test_only_events_are_read():
    assert fork_client._event_in(b'{"ended": 0, "pid": 13, "status": -9}\n') == {"ended": 0, "pid": 13, "status": -9}
    for line in (b"\n", b"Welcome\n", b"{\n", b"7\n", b"[1]\n", b"\xff\n"):
        assert fork_client._event_in(line) == {}


# -- files beside the notebook


@pytest.fixture
def beside(tmp_path, monkeypatch) -> Path:
    """Return the folder of a notebook, which is the current one and on Python's path, as in a kernel."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["/first", "", str(tmp_path), "/last"])
    return tmp_path


def test_the_notebooks_folder_moves_to_the_end_of_the_path(beside):
    folders.search_last()
    assert sys.path == ["/first", "/last", "", str(beside)]


@pytest.mark.parametrize("name", ["torch", "numpy", "queue", "socket", "statistics"])
@pytest.mark.parametrize("file", ["{}.py", "{}/__init__.py"])
def test_a_file_that_was_imported_in_place_of_a_module_is_named(beside, monkeypatch, name, file):
    module = ModuleType(name)
    module.__file__ = str(beside / file.format(name))
    monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(ranks.RanksError, match="rename it, then restart the kernel") as caught:
        folders.search_last()
    assert module.__file__ in str(caught.value)


def test_other_files_beside_the_notebook_may_be_imported(beside, monkeypatch):
    for name in ("my_helper", "models"):
        module = ModuleType(name)
        module.__file__ = str(beside / f"{name}.py")
        monkeypatch.setitem(sys.modules, name, module)
    folders.search_last()


def test_the_fork_server_does_not_search_the_notebooks_folder(beside, monkeypatch):
    for inherited in ("", ".", f"{beside}:", f":{beside}", "../" + beside.name):
        monkeypatch.setenv("PYTHONPATH", inherited)
        assert folders.python_path() == str(ROOT)
    monkeypatch.setenv("PYTHONPATH", "src:/opt/tools")
    assert folders.python_path() == f"{ROOT}:{beside / 'src'}:/opt/tools"


def test_a_kernel_of_another_python_is_named():
    folders.check_installed("psutil", "torch")
    with pytest.raises(ranks.RanksError, match="does not have no_such_package: choose the course's own kernel"):
        folders.check_installed("torch", "no_such_package")


# -- folders that were left behind


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_next_start_removes_folders_that_no_process_holds(temporary):
    stale, held = folders.create()
    Path(stale, "rank-0.log").touch()
    os.close(held)
    _, held = folders.create()
    os.close(held)
    assert not Path(stale).exists()


def test_folders_in_use_or_of_unknown_origin_are_kept(temporary):
    in_use, held = folders.create()
    child = subprocess.Popen(["sleep", "60"], pass_fds=[held])
    os.close(held)  # The kernel is gone, but a rank still runs.
    unknown = temporary / "ranks-unknown"
    unknown.mkdir()
    elsewhere, elsewhere_held = folders.create()
    os.close(elsewhere_held)
    target = temporary / "target"
    os.rename(elsewhere, target)
    (temporary / "ranks-link").symlink_to(target)
    try:
        os.close(folders.create()[1])
        assert Path(in_use).exists() and unknown.exists() and target.exists()
    finally:
        child.kill()
        child.wait()
    os.close(folders.create()[1])
    assert not Path(in_use).exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can create another user's folder")
def test_folders_of_other_users_are_kept(temporary):
    path, held = folders.create()
    os.close(held)
    os.chown(path, 12345, 12345)
    os.close(folders.create()[1])
    assert Path(path).exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, ranks outlive the fork server")
def test_nothing_is_left_after_a_kernel_and_its_fork_server_were_killed(temporary):
    program = (
        START
        + """
import os, signal
server = ranks.current()._server
print(json.dumps([server.run_dir, *server.pids.values()]), flush=True)
os.kill(server._process.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    environment = os.environ | {"TMPDIR": str(temporary)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, timeout=scaled(120))
    run_dir, *pids = json.loads(done.stdout.splitlines()[-1])
    deadline = time.monotonic() + scaled(20)
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline, "a process outlives the kernel and the fork server"
        time.sleep(0.02)
    assert Path(run_dir).exists()
    while Path(run_dir).exists():
        assert time.monotonic() < deadline, "some other process holds the folder"
        os.close(folders.create()[1])


# -- processes that die


SOON_S = scaled(15.0)  # far below the deadlines after which a start gives up


def server_that(script: str, folder: Path, monkeypatch) -> fork_client.ForkServer:
    """Return a fork server that is a shell script instead."""

    def start(server, environment, log):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log}
        return subprocess.Popen(["sh", "-c", script], **pipes, start_new_session=True)

    monkeypatch.setattr(fork_client.ForkServer, "_start", start)
    return fork_client.ForkServer(str(folder))


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo its last words >&2; exit 3", "exited with status 3. its last words"),
        ("echo noise; echo its last words >&2; kill -9 $$", "(SIGKILL), either by hand or by the system because"),
        ("sleep 0.2; kill -SEGV $$", "was ended by signal SIGSEGV"),
        ("exec 1>&-; sleep 0.3; exit 4", "exited with status 4"),
    ],
)
def test_a_fork_server_that_dies_is_noticed_at_once(tmp_path, monkeypatch, script, expected):
    server = server_that(script, tmp_path, monkeypatch)
    began = time.monotonic()
    for wait in (
        lambda: server.expect(lambda server: False, "Nothing happened"),
        lambda: server.check([]),
        lambda: [server.request(do="ranks") for _ in range(9)],
    ):
        with pytest.raises(RuntimeError) as caught:
            wait()
        assert expected in str(caught.value)
    assert time.monotonic() - began < SOON_S
    server.close()


def test_a_fork_server_that_only_takes_long_is_not_called_dead(tmp_path, monkeypatch):
    server = server_that("sleep 60", tmp_path, monkeypatch)
    with pytest.raises(RuntimeError, match=r"^Nothing happened within 0\.1 s"):
        server.expect(lambda server: False, "Nothing happened", timeout_s=0.1)
    server.close(timeout_s=0.1)


def test_a_rank_that_dies_is_named_with_its_last_words(tmp_path, monkeypatch):
    server = server_that("cat", tmp_path, monkeypatch)
    server.pids.update({0: 20, 1: 21})
    server.check(range(2))
    (tmp_path / "rank-1.log").write_text("No module named 'torch'")
    server.ended[21] = 1
    with pytest.raises(RuntimeError, match=r"Rank 1 exited with status 1 while it was starting\. No module named"):
        server.check(range(2))
    server.pids.clear()  # so that nobody signals processes that are not ours
    server.close()


def test_a_new_process_does_not_count_as_ended_because_an_earlier_one_had_its_number(tmp_path, monkeypatch):
    """Ranks that start again and again meet each number again. A new rank counted as killed, and two starts failed."""
    server = server_that("cat", tmp_path, monkeypatch)  # answers with the events that it is given
    server.request(started=0, pid=20)
    server.request(ended=0, pid=20, status=-signal.SIGKILL)
    server.request(started=1, pid=20)
    server.expect(lambda server: 1 in server.pids, "Rank 1 did not start")
    server.check([1])
    server.pids.clear()
    server.close()


@pytest.mark.parametrize("fails", ["exits", "is missing"])
def test_a_start_without_a_fork_server_fails_at_once(tmp_path, monkeypatch, fails):
    python = tmp_path / "python"
    if fails == "exits":
        python.write_text("#!/bin/sh\necho this Python is broken >&2\nexit 7\n")
        python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    began = time.monotonic()
    expected = "exited with status 7. this Python is broken" if fails == "exits" else "No such file.*python"
    with pytest.raises(ranks.RanksError, match=expected):
        ranks.start(2)
    assert time.monotonic() - began < SOON_S


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["the fork server", 1])
def test_a_process_that_is_killed_during_the_start_ends_it_at_once(monkeypatch, victim):
    killed_s = []

    def kill(server) -> None:
        while (pid := server._process.pid if victim == "the fork server" else server.pids.get(victim)) is None:
            time.sleep(0.01)
        os.kill(pid, signal.SIGSTOP)  # a quick start would be over before the kill
        time.sleep(0.3)
        os.kill(pid, signal.SIGKILL)
        killed_s.append(time.monotonic())

    start = fork_client.ForkServer._start

    def start_and_kill(server, environment, log):
        server._process = start(server, environment, log)
        threading.Thread(target=kill, args=[server], daemon=True).start()
        return server._process

    monkeypatch.setattr(fork_client.ForkServer, "_start", start_and_kill)
    with pytest.raises(
        ranks.RanksError, match=r"(Rank 1|Rank 1 died: its process|starts ranks) was killed \(SIGKILL\)"
    ):
        ranks.start(2)
    assert time.monotonic() - killed_s[0] < SOON_S


# -- the network, memory and open files


def test_ranks_use_loopback_whatever_a_cluster_says(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wlan7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    rankside.use_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0") and "NCCL_SOCKET_IFNAME" not in os.environ


OFFLINE = """
printf '127.0.0.1 localhost\n' > hosts; printf 'nameserver 192.0.2.99\n' > resolv
hostname students-laptop; mount --bind hosts /etc/hosts; mount --bind resolv /etc/resolv.conf; exec "$@"
"""


@pytest.mark.slow
def test_ranks_start_where_no_server_resolves_the_machines_name(tmp_path):
    offline = ["unshare", "--uts", "--mount", "sh", "-c", OFFLINE, "sh"]
    if os.getuid() or subprocess.run([*offline, "true"], cwd=tmp_path, capture_output=True).returncode:
        pytest.skip("only root can give a process another host name")
    program = START + "import torch.distributed as dist\n"
    program += "print(ranks.run(lambda: __import__('torch').distributed.new_group([0, 1]) is not None))"
    command = [*offline, sys.executable, "-c", program]
    variables = os.environ | {"GLOO_SOCKET_IFNAME": "wlan7"}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=scaled(120))
    assert done.stdout.splitlines()[-1:] == ["[True, True]"], done.stderr
    assert "RuntimeWarning" not in done.stderr


@pytest.mark.parametrize(
    ("limits", "result"),
    [
        ((64, 64), "may open only 64: raise the limit"),
        ((64, 119), "4 ranks need 120 open files"),
        ((64, 4096), (120, 4096)),
        ((64, resource.RLIM_INFINITY), (120, resource.RLIM_INFINITY)),
        ((120, 120), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_the_limit_of_open_files_is_raised_or_named(monkeypatch, limits, result):
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, to: raised.append(to))
    with pytest.raises(ranks.RanksError, match=result) if isinstance(result, str) else contextlib.nullcontext():
        devices.check_open_files(4)
    assert raised == ([result] if isinstance(result, tuple) else [])


V1, V2 = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), ("max", "current", "inactive_file")


def group(folder: Path, names: tuple[str, str, str], limit: str, used: str = "300", cached: str = "0") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"memory.{names[0]}").write_text(limit)
    (folder / f"memory.{names[1]}").write_text(used)
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cached}\n")


@pytest.mark.parametrize(
    ("own", "groups", "left"),
    [
        ("0::/a/b\n", [("a", V2, "900"), ("a/b", V2, "max")], 600),
        ("0::/a/b\n", [("a", V2, "900"), ("a/b", V2, "800")], 500),
        ("0::/\n", [("", V2, "700", "700", "50")], 50),
        ("0::/../x\n", [("", V2, "700")], 400),
        ("4:memory:/docker/1\n", [("memory/docker/1", V1, "800", "700", "20")], 120),
        ("4:memory:/docker/1\n", [("memory", V1, "800")], 500),
        ("4:cpu:/\n4:memory:/\n", [("memory", V1, str((1 << 63) - 4096))], None),
        ("0::/\n", [("", V2, "100", "300")], 0),
        ("0::/\n", [], None),
    ],
)
def test_what_a_container_leaves_is_known(tmp_path, own, groups, left):
    (tmp_path / "own").write_text(own)
    for folder, *limits in groups:
        group(tmp_path / "root" / folder, *limits)
    assert containers.left_bytes(tmp_path / "root", tmp_path / "own") == left
    assert containers.left_bytes(tmp_path / "root", tmp_path / "missing") is None


def test_a_container_that_is_too_small_is_named(monkeypatch):
    monkeypatch.setattr(containers, "left_bytes", lambda: 200_000_000)
    with pytest.raises(ranks.RanksError, match=r"leaves 0\.20 GB of memory, and ranks need 0\.25 GB .*--memory=1g"):
        ranks.start(2)
    for enough in (300_000_000, None):
        monkeypatch.setattr(containers, "left_bytes", lambda enough=enough: enough)
        devices.check_container()


def test_a_gpu_for_one_process_is_explained():
    class Busy:
        def wait(self, seconds): ...
        def ready(self):
            return True

        def get(self, timeout):
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors")

    line = SimpleNamespace(apply_async=lambda *_: Busy())
    waiting = SimpleNamespace(_lines=[line], _deaths=dict, _server=SimpleNamespace(runs=True))
    with pytest.raises(
        ranks.RanksError, match=r"are busy or unavailable\. The compute mode .* `sudo nvidia-smi -c DEFAU"
    ):
        processes.RankProcesses._on_all(waiting, lambda rank: ())


@pytest.mark.slow
def test_ranks_that_do_not_start_again_are_an_error_for_the_student(two_ranks, monkeypatch):
    def fails(server, invitations) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr(fork_client.ForkServer, "start_ranks", fails)
    with pytest.raises(ranks.RanksError, match=r"^The ranks did not start again: no more"):
        ranks.current().restart()
    ranks.stop()
