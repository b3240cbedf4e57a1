"""Give each rank a user, files and shared memory of its own, so that only the network connects it with other ranks.

The network is measured from outside. Without this module, ranks could also pass values through files, the system's
shared memory, signals, locks, or the memory of each other's processes, and no check would see it.

The fork server calls `enter` in every rank before it runs anybody's code. It is root at that time.
"""

import contextlib
import ctypes
import os
import platform
import signal
import struct
import tempfile

_NEW_MOUNTS, _NEW_IPC = 0x20000, 0x8000000  # Source: linux/sched.h
_RECURSIVE, _PRIVATE, _NO_SUID, _NO_DEVICES, _NO_PROGRAMS = 0x4000, 0x40000, 2, 4, 8  # Source: sys/mount.h
_MOST_DESCRIPTORS = 4096
_SET_DUMPABLE = 4
SHARED_FOLDERS = ("/dev/shm", "/tmp")
TERMINALS = "/dev/pts"  # A rank could open a terminal there for all others.
# Source: linux/prctl.h, linux/seccomp.h, linux/bpf_common.h, linux/audit.h and the system's tables of calls
_NO_NEW_PRIVILEGES, _SET_FILTER, _FILTER = 38, 22, 2
_ALLOW, _REFUSE = 0x7FFF0000, 0x50000 | 1  # with EPERM
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _AND, _RETURN = 0x20, 0x15, 0x35, 0x54, 0x06
_NUMBER, _MACHINE, _FIRST, _SECOND, _THIRD = 0, 4, 16, 24, 32  # where a call's number and its arguments are
_MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FOREIGN = 0x40000000  # From here on, the numbers are those of x32, another way to make the same calls.
_SOCKET = {"x86_64": 41, "aarch64": 198}
_FCNTL = {"x86_64": 72, "aarch64": 25}
_REFUSED = {
    "x86_64": {"flock": 73, "add_key": 248, "request_key": 249, "keyctl": 250, "process_vm_readv": 310, "ptrace": 101}
    | {"process_vm_writev": 311, "io_uring_setup": 425, "pidfd_getfd": 438, "memfd_secret": 447}
    # These change properties of a process that other processes can read.
    | {"setpgid": 109, "setsid": 112, "setpriority": 141, "sched_setparam": 142}
    | {"sched_setaffinity": 203, "ioprio_set": 251, "sched_setattr": 314},
    "aarch64": {"flock": 32, "add_key": 217, "request_key": 218, "keyctl": 219, "process_vm_readv": 270, "ptrace": 117}
    | {"process_vm_writev": 271, "io_uring_setup": 425, "pidfd_getfd": 438, "memfd_secret": 447}
    | {"setpgid": 154, "setsid": 157, "setpriority": 140, "sched_setparam": 118}
    | {"sched_setaffinity": 122, "ioprio_set": 30, "sched_setattr": 274},
}
_INTERNET, _STREAM, _TYPE_BITS = (2, 10), 1, 0xF  # families IPv4 and IPv6, and only TCP, whose bytes are counted
_NETLINK, _ROUTES = 16, 0  # no process may send messages to another one over it
_LOCKS = (6, 7, 37, 38, 1024)  # F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE


def enter(rank: int, settings: dict) -> None:
    """Isolate this process, which is about to become a rank.

    Args:
        settings: `users` holds the user ids of the judge and of each rank, or is None if the fork server is not
            root. `files` and `all_bytes` limit the number and the total size of the files that each rank may create.
            `run_dir` is the folder for these files.
    """
    users = settings["users"]
    os.closerange(3, _MOST_DESCRIPTORS)  # The fork server's pipes would connect all ranks.
    if users:
        os.fchown(1, users[0], users[0])  # its log, which other ranks could read otherwise
        os.fchmod(1, 0o600)
        _take_room(rank, settings)
        _become(users[1 + rank])
        _end_earlier_processes()
    close_side_ways()


def _take_room(rank: int, settings: dict) -> None:
    """Give a rank files of its own, while this process is root."""
    judge, user = settings["users"][0], settings["users"][1 + rank]
    folder = os.path.join(settings["run_dir"], f"files-{rank}")
    os.makedirs(folder, exist_ok=True)
    if has_own_mounts():
        limits = f"size={settings['all_bytes']},nr_inodes={settings['files']},mode=0700,uid={user},gid={user}"
        mounted = [path for path in (*SHARED_FOLDERS, TERMINALS) if os.path.ismount(path)]
        for own in (folder, *(path for path in mounted if not folder.startswith(path + os.sep))):
            _mount(own, "tmpfs", limits)
        _mount("/proc", "proc", "hidepid=invisible")  # Any process may set its name, which others could read.
    os.chown(folder, user, user)
    os.chmod(folder, 0o700)
    with open(os.path.join(settings["run_dir"], f"sizes-{rank}"), "wb") as sizes:
        os.fchown(sizes.fileno(), user, judge)
        os.fchmod(sizes.fileno(), 0o640)
    os.environ.update(HOME=folder, TMPDIR=folder)
    tempfile.tempdir = None


def _become(user: int) -> None:
    """Turn this process, which is root, into another user's."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    os.umask(0)  # The judge is another user, and removes the folders that it shares with its ranks.
    ctypes.CDLL(None).prctl(_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise it could not read its own files in /proc


def _end_earlier_processes() -> None:
    """End all other processes of this user, who is no longer root.

    If an earlier rank of this number has forked, its children still hold its connections to the other ranks.
    """
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)


def has_own_mounts() -> bool:
    """Give this process mounts and shared memory of its own. Returns False where the system does not allow it."""
    system = ctypes.CDLL(None, use_errno=True)
    if not hasattr(system, "unshare") or system.unshare(_NEW_MOUNTS | _NEW_IPC):
        return False
    return not system.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None)


def _mount(folder: str, kind: str, options: str) -> None:
    system = ctypes.CDLL(None, use_errno=True)
    flags = _NO_SUID | _NO_DEVICES | _NO_PROGRAMS
    if system.mount(kind.encode(), folder.encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"cannot mount {kind} at {folder}")


def is_complete() -> bool:
    """Return whether this system lets ranks be separated completely. This process has to be root."""
    if platform.machine() not in _MACHINES:
        return False
    child = os.fork()
    if child == 0:
        os._exit(0 if has_own_mounts() else 1)
    _, status = os.waitpid(child, 0)
    return status == 0


def close_side_ways() -> None:
    """Block system calls with which this process could reach others without the network: local sockets, locks, keys."""
    machine = platform.machine()
    if machine not in _MACHINES:
        return
    program = _assembled(machine)
    code = ctypes.create_string_buffer(b"".join(program))
    filtered = struct.pack("=HxxxxxxQ", len(program), ctypes.addressof(code))
    system = ctypes.CDLL(None, use_errno=True)
    if system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or system.prctl(_SET_FILTER, _FILTER, filtered, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot filter system calls")


def _assembled(machine: str) -> list[bytes]:
    """Return the filter as instructions of the classic Berkeley packet filter."""

    def step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, value)

    refuse = step(_RETURN, _REFUSE)
    program = [step(_LOAD, _MACHINE), step(_IF_EQUAL, _MACHINES[machine], 1, 0), refuse, step(_LOAD, _NUMBER)]
    program += [step(_IF_AT_LEAST, _FOREIGN, 0, 1), refuse]
    for number in _REFUSED[machine].values():
        program += [step(_IF_EQUAL, number, 0, 1), refuse]
    # fcntl: reject locks, which ranks could set on files that all of them may read
    locks = [part for command in _LOCKS for part in (step(_IF_EQUAL, command, 0, 1), refuse)]
    locks = [step(_LOAD, _SECOND), *locks, step(_RETURN, _ALLOW)]
    program += [step(_IF_EQUAL, _FCNTL[machine], 0, len(locks)), *locks]
    # socket: allow TCP, and questions to the system about its network
    netlink = [step(_LOAD, _THIRD), step(_IF_EQUAL, _ROUTES, 0, 1), step(_RETURN, _ALLOW), refuse]
    sockets = [step(_LOAD, _FIRST), step(_IF_EQUAL, _NETLINK, 0, len(netlink)), *netlink]
    sockets += [step(_IF_EQUAL, family, 2 - at, 0) for at, family in enumerate(_INTERNET)] + [refuse]
    sockets += [step(_LOAD, _SECOND), step(_AND, _TYPE_BITS), step(_IF_EQUAL, _STREAM, 1, 0), refuse]
    program += [step(_IF_EQUAL, _SOCKET[machine], 0, len(sockets)), *sockets]
    return [*program, step(_RETURN, _ALLOW)]
