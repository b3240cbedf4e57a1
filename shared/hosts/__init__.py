"""Put each rank on its own host, or several on one: a network namespace behind a link whose rate the kernel enforces.

    host0: eth0 ── link ── port0 ┐
    host1: eth0 ── link ── port1 ┤ switch
    host2: eth0 ── link ── port2 ┘

A network namespace and its interfaces disappear when no process is in it and no open file refers to it. These
namespaces have no names, because a name would keep them alive. Instead, the fork server holds their files open, and the
ranks move into them. No matter how these processes end, nothing is left behind. Every set of ranks has its own switch,
so two notebooks can use the same addresses. Ranks that share a host communicate over its loopback interface.
"""

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shared.deadlines import scaled

INTERFACE = "eth0"  # of every host: interface names are local to a namespace
# Environment variables of a rank: the open file that refers to its host, and the rate of the link in front of it.
HOST_FILE, HOST_BITS_PER_S = "RANKS_HOST_FILE", "RANKS_HOST_BITS_PER_S"
RANKS_PER_HOST = "RANKS_PER_HOST"  # how many consecutive ranks share a host, and its link
_CLONE_NEWNET = 0x40000000
_NEEDED_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_SYSTEM_PATH = ":/usr/sbin:/sbin"  # on many systems only on root's PATH
_TIMEOUT_S = scaled(10.0)
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_MIN_RATE, _MAX_RATE = 1e6, 100e9
_MTU_BYTES = 9000  # jumbo frames, as in a cluster, so that headers are only 1% of the bytes
# A sender passes packets of up to 64 KiB to the link, and a smaller token bucket would split them. The timer of a busy
# machine may fire 1 ms late, which must not reduce the rate either. Starting with a full token bucket makes a transfer
# of 16 MiB at 1 Gbit/s only 1% faster.
_BURST_BYTES, _BURST_S = 128 << 10, 1e-3
# Larger than everything TCP can have in flight. If all ranks send to one, a dropped packet would cost 200 ms until it
# is sent again.
_QUEUE_BYTES = 64 << 20
# reno reduces its rate only after losses, and there are none. Other algorithms probe for the rate: at 100 Mbit/s, every
# second all-reduce took up to a quarter longer with cubic and bbr.
_CONGESTION_CONTROL = "reno"


def bits_per_s(link: str) -> float:
    """Parse the rate of a link, such as "1gbit", "2.5gbit" or "100mbit", into bits per second.

    Raises:
        ValueError: If the text is not a rate, or is out of range.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmg])bit", link.lower()) if isinstance(link, str) else None
    rate = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise ValueError(f'link must be a rate from "1mbit" to "100gbit", such as "1gbit" or "2.5gbit", got {link!r}')
    return rate


def why_not() -> str | None:
    """Try to make a host. Returns one sentence on why this machine cannot make hosts, or None if it can."""
    if sys.platform != "linux":
        return f"Giving each rank its own host needs Linux network namespaces, but this system is {sys.platform}."
    missing = [program for program in ("ip", "tc", *as_root()[:1]) if _path_of(program) is None]
    if missing:
        return f"This machine lacks {' and '.join(missing)}. Install the packages iproute2 and util-linux."
    course, command = Path(__file__).parents[2], [*as_root(), sys.executable, "-m", "shared.hosts"]
    try:
        result = subprocess.run(
            command, cwd=course, capture_output=True, text=True, timeout=_TIMEOUT_S, encoding="utf-8", errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"Creating a network namespace with a shaped link took more than {_TIMEOUT_S:g} s on this machine."
    if result.returncode == 0:
        return None
    error = (result.stderr.strip().splitlines() or [f"status {result.returncode}"])[-1]
    return f"This machine does not allow the course to create network namespaces with shaped links ({error})."


def as_root() -> list[str]:
    """Return the prefix of a command that makes hosts: empty if this process may make them, else a user namespace."""
    effective = re.search(
        r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    )
    if effective and all(int(effective[1], 16) >> bit & 1 for bit in _NEEDED_CAPABILITIES.values()):
        return []
    return ["unshare", "--user", "--map-root-user", "--"]


def build(count: int, rate_bits_per_s: float) -> list[int]:
    """Make hosts and a switch between them. Returns open files that keep them alive: one per host, then the switch's.

    Raises:
        OSError: If the system does not allow it.
    """
    with ThreadPoolExecutor(1) as moving:  # making a namespace moves only the calling thread into it
        return moving.submit(_build, count, rate_bits_per_s).result()


def _build(count: int, rate_bits_per_s: float) -> list[int]:
    with contextlib.ExitStack() as undo:
        files = []
        for _ in range(count + 1):
            _call_linux("unshare", _CLONE_NEWNET)
            files.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            undo.callback(os.close, files[-1])
        ports = [f"port{index}" for index in range(count)]
        switch = ["link add switch type bridge mcast_snooping 0", "link set switch up"]
        for port, file in zip(ports, files, strict=False):
            host_end = f"{INTERFACE} mtu {_MTU_BYTES} netns /proc/self/fd/{file}"
            switch.append(f"link add {port} mtu {_MTU_BYTES} type veth peer name {host_end}")
            switch.append(f"link set {port} master switch addrgenmode none up")
        _batch("ip", switch, files)
        _batch("tc", [_shaped(port, rate_bits_per_s) for port in ports])
        for index, file in enumerate(files[:-1]):
            _call_linux("setns", file, _CLONE_NEWNET)
            _batch("tc", [_shaped(INTERFACE, rate_bits_per_s)])
            address = f"address add 10.0.0.{index + 1}/24 dev {INTERFACE} noprefixroute"
            up = ["link set lo up", f"link set {INTERFACE} addrgenmode none up"]
            _batch("ip", [*up, address, f"route add 10.0.0.0/24 dev {INTERFACE} congctl {_CONGESTION_CONTROL}"])
        undo.pop_all()
        return files


def _shaped(interface: str, rate_bits_per_s: float) -> str:
    """Return the tc command that shapes an interface's outgoing traffic. Shaping both ends shapes both directions."""
    burst_bytes = max(_BURST_BYTES, rate_bits_per_s / 8 * _BURST_S)
    shape = f"rate {rate_bits_per_s:.0f}bit burst {burst_bytes:.0f} limit {_QUEUE_BYTES}"
    return f"qdisc add dev {interface} root tbf {shape}"


def _batch(program: str, lines: list[str], files: Sequence[int] = ()) -> None:
    result = subprocess.run(
        [_path_of(program) or program, "-batch", "-"],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        pass_fds=files,
        encoding="utf-8",
        errors="replace",
    )
    if result.returncode:
        error = result.stderr.strip().splitlines()[0] if result.stderr.strip() else result.returncode
        raise OSError(f"{program}: {error}")


def _path_of(program: str) -> str | None:
    return shutil.which(program, path=os.environ.get("PATH", "") + _SYSTEM_PATH)


def _call_linux(name: str, *arguments: int) -> None:
    """Call a C function that Python offers only since version 3.12, such as `unshare` and `setns`."""
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def enter() -> None:
    """Move a rank's main thread to the host that the fork server holds for it, if it has one.

    A socket stays in the namespace in which it was created, so connections to the kernel have to exist before the move.
    A thread starts in the namespace of the thread that creates it, so the threads of the process group have to be
    created after the move.
    """
    if HOST_FILE in os.environ:
        assert threading.current_thread() is threading.main_thread(), "only the calling thread moves to the host"
        _call_linux("setns", int(os.environ[HOST_FILE]), _CLONE_NEWNET)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
