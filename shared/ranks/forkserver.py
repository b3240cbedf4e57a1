"""The fork server: a process that imports torch once, then forks every rank.

Importing torch takes about a second of CPU time, so four ranks that each import it take two seconds on two cores. Here
it is imported once, and forked ranks already have it in memory.

The notebook's kernel starts this process with a pipe on stdin. Requests arrive as lines of JSON on stdin, and events
are written as lines of JSON to the pipe that was stdout. Whatever else this process prints goes to its log:

    → {"do": "hosts", "n": 4, "bits_per_s": 1e9, "ranks_per_host": 1}     ← {"hosts": 4} or {"no_hosts": "why"}
    → {"do": "ranks", "invitations": [[port, token], ...], "env": {}}     ← {"started": 0, "pid": 13} ...
                                                                          ← {"ended": 0, "pid": 13, "status": -9}
    → {"do": "mps", "folder": path}                                       ← {"mps": 14} or {"no_mps": "why"}
    → {"do": "signal", "pid": 13, "number": 2, "group": false}

No matter how the kernel ends, the pipe closes. This process then kills every child and removes their files, so no other
cleanup is needed.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import selectors
import shutil
import signal
import subprocess
import sys
import traceback
from pathlib import Path

from shared import hosts
from shared.ranks import mps

FOLDER = "RANKS_FOLDER"  # an environment variable: the notebook's folder, to which ranks change once they have started
ISOLATION = "RANKS_ISOLATION"  # an environment variable: how ranks are separated from each other; see fork_client.py
_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
_children: dict[int, int] = {}  # pid → rank
_mps: list[mps.Mps] = []  # the daemon that lets ranks use a GPU at the same time; empty without one
_events = 1  # the file descriptor to which events are written
_hosts: list[int] = []  # open files that keep the ranks' hosts alive; empty if ranks share the machine's network


def _send(**event) -> None:
    """Write one event. If the kernel is gone, the pipe may be broken; stdin then reports end-of-file."""
    with contextlib.suppress(BrokenPipeError):
        os.write(_events, json.dumps(event).encode() + b"\n")


def _fork(rank: int, invitation: tuple[int, str], log_path: str, env: dict[str, str]) -> None:
    """Fork a rank, in a session of its own, with its output in a file and without access to our pipes.

    Args:
        invitation: The port and the token with which the rank connects to the kernel.
    """
    pid = os.fork()
    if pid:
        _children[pid] = rank
        _send(started=rank, pid=pid)
        return
    status = 1
    try:
        _die_with_parent()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(env)
        log = os.open(log_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(_events)
        if ISOLATION in os.environ:
            settings = json.loads(os.environ[ISOLATION])
            importlib.import_module(settings["module"]).enter(rank, settings)
        random.seed()  # a fork copies the random generator's state, and ranks must not draw the same numbers
        from shared.ranks import lines  # It has been imported (see _preload).

        port, token = invitation
        lines.answer_calls(port, bytes.fromhex(token))
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()  # goes to the child's log, which the kernel quotes
    finally:
        sys.stderr.flush()
        os._exit(status)


def _die_with_parent() -> None:
    """Let Linux end this process when its parent dies, because if the kernel has died as well, nobody else does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _preload(run_dir: str) -> None:
    """Import what every rank needs, and start its shell.

    CUDA is not initialized, because a forked process cannot use its parent's. The garbage collector is off during the
    imports. They allocate a million objects and free few, so collecting would take a fifth of the time. Afterwards,
    gc.freeze() excludes the loaded objects from collection, so that ranks keep sharing their memory.
    """
    gc.disable()
    import torch._dynamo
    import torch.distributed  # noqa: F401

    from shared.ranks import interactive, lines, rankside  # noqa: F401

    interactive.start_shell(os.path.join(run_dir, "profile"))
    gc.freeze()
    gc.enable()


def _handle(request: dict, run_dir: str) -> None:
    if request["do"] == "hosts":
        try:
            _hosts.extend(hosts.build(request["n"], request["bits_per_s"]))
            os.environ[hosts.HOST_BITS_PER_S] = str(request["bits_per_s"])  # ranks inherit these
            os.environ[hosts.RANKS_PER_HOST] = str(request["ranks_per_host"])
            _send(hosts=request["n"])
        except (OSError, subprocess.TimeoutExpired) as error:
            _send(no_hosts=str(error))
    elif request["do"] == "mps":
        _start_mps(Path(request["folder"]))
    elif request["do"] == "signal":
        if request["pid"] in _children:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if request["group"] else os.kill)(request["pid"], request["number"])
    elif request["do"] == "ranks":
        # Every rank inherits all tokens. They are useless once all ranks have connected, before any cell runs.
        for rank, invitation in enumerate(request["invitations"]):
            host = {}
            if _hosts:
                host = {hosts.HOST_FILE: str(_hosts[rank // int(os.environ[hosts.RANKS_PER_HOST])])}
            _fork(rank, invitation, os.path.join(run_dir, f"rank-{rank}.log"), request["env"] | host)


def _start_mps(folder: Path) -> None:
    """Start MPS anew: if a rank died while it used the GPU, the daemon may not serve the next one."""
    _end_mps()
    try:
        daemon = mps.Mps(folder)
    except (mps.NoMps, OSError) as reason:
        _send(no_mps=str(reason))
    else:
        _mps.append(daemon)
        os.environ.update(daemon.environment)  # ranks inherit it
        _send(mps=daemon.pid)


def _end_mps() -> None:
    while _mps:
        daemon = _mps.pop()
        for name in daemon.environment:
            os.environ.pop(name, None)
        daemon.close()


def _reap() -> None:
    """Report to the kernel which children ended, and how (a negative status is the signal that ended the child)."""
    while _children:
        pid, wait_status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid not in _children:  # MPS's daemon, which has ended by itself
            continue
        _kill_group(pid)  # also ends processes that the child started, such as data loader workers
        _send(ended=_children.pop(pid), pid=pid, status=os.waitstatus_to_exitcode(wait_status))


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _keep_events_apart() -> None:
    """Keep the pipe for events, and send everything that is printed to the log.

    A site's own code may already have printed something while Python was starting. Python's buffer still has some of
    it, and goes to the log as well. The kernel ignores what has reached the pipe (see `_event_in` in fork_client.py).
    """
    global _events
    _events = os.dup(1)
    os.dup2(2, 1)
    with contextlib.suppress(AttributeError, OSError):
        sys.stdout.flush()
    os.write(_events, b"\n")  # so that the first event begins a line


def main(run_dir: str) -> None:
    """Serve requests until stdin closes, then end all children and remove run_dir."""
    _keep_events_apart()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for a cell, not for this process
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    pending = b""
    try:
        _preload(run_dir)
        while True:
            for key, _ in selector.select():
                if key.fd == wake_read:
                    os.read(wake_read, 4096)
                    _reap()
                    continue
                chunk = os.read(0, 1 << 16)
                if not chunk:
                    return
                *lines, pending = (pending + chunk).split(b"\n")
                for line in lines:
                    _handle(json.loads(line), run_dir)
                    _reap()
    finally:
        for pid in _children:
            _kill_group(pid)
        for pid in _children:
            os.waitpid(pid, 0)  # A process that is still ending may write to run_dir.
        _end_mps()
        shutil.rmtree(run_dir, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
