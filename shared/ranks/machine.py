"""Checks whether the course can run on this machine: `make doctor`, or `python -m shared.ranks.machine`.

Each line shows what was found, then OK or what to do. Exits with 1 if the course cannot run. If something optional is
missing, such as GPUs, its line says what that means.
"""

import contextlib
import importlib.metadata
import io
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from shared import deepspeed_engine, hosts, ranks, tables
from shared.ranks import devices

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "jupyterlab", "ipywidgets", "ipyparallel", "matplotlib", "nbval", "pytest")
LAB_PORT = 8888  # the port that JupyterLab tries first
OPTIONAL = (  # names of a program, its Debian package, and its purpose
    (("chromium", "chromium-browser", "google-chrome"), "chromium", "the browser tests"),
    (("bwrap",), "bubblewrap", "grading"),
)
LEAST_FREE_GB, LEAST_MEMORY_GB = 1.0, 2.0


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    found: str
    advice: str = ""  # what to do; empty if all is well
    needed: bool = False  # whether the course needs it in order to run

    @property
    def stops(self) -> bool:
        return self.needed and bool(self.advice)


def python() -> Iterator[Finding]:
    version, fits = platform.python_version(), (3, 11) <= sys.version_info[:2] <= (3, 14)
    yield Finding("Python", version, "" if fits else "install Python 3.11 to 3.14, and run make lab again", needed=True)


def packages() -> Iterator[Finding]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    tested = dict(line.split("==") for line in lines if "==" in line)
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "make lab installs it", needed=True)
            continue
        same = version.split("+")[0] == tested[name]
        yield Finding(name, version, "" if same else f"tested with {tested[name]}: make lab installs that")


def loopback() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2):
            yield Finding("loopback ports", "open", needed=True)
    except OSError as error:
        yield Finding("loopback ports", str(error), "let processes of this machine talk on 127.0.0.1", needed=True)


def lab_port() -> Iterator[Finding]:
    with contextlib.closing(socket.socket()) as client:
        client.settimeout(2)
        taken = client.connect_ex(("127.0.0.1", LAB_PORT)) == 0
    advice = "make lab takes the next one, and prints it" if taken else ""
    yield Finding(f"port {LAB_PORT}", "taken" if taken else "free", advice)


def resources() -> Iterator[Finding]:
    cores, memory_gb = os.cpu_count() or 1, psutil.virtual_memory().available / 1e9
    few = "4 ranks share them: values and bytes are right, times are ratios within a run"
    yield Finding("cores", str(cores), "" if cores >= 4 else few)
    advice = "" if memory_gb >= LEAST_MEMORY_GB else "4 ranks need about 2 GB: close something"
    yield Finding("free memory", f"{memory_gb:.1f} GB", advice, needed=True)
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    yield Finding("free disk", f"{free_gb:.0f} GB", "" if free_gb >= LEAST_FREE_GB else "free some", needed=True)


def gpus() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    count = devices.gpu_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(number) for number in range(count)}))
    none = "nothing: ranks use gloo on the CPU"
    shared = "" if count >= 4 else f"lessons with {count + 1} ranks or more share them through gloo"
    yield Finding("GPUs", f"{count} {names}".strip(), shared if count else none)
    if dist.is_nccl_available():
        yield Finding("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
    else:
        yield Finding("NCCL", "missing", "install torch's CUDA build" if count else "nothing: it is for GPUs")


def links() -> Iterator[Finding]:
    why = hosts.why_not()
    emulated = f"{why} Lessons emulate links then, and say so" if why else ""
    yield Finding("shaped links", "no" if why else "yes", emulated)


def peers() -> Iterator[Finding]:
    why = deepspeed_engine.why_not()
    yield Finding("DeepSpeed", "no" if why else importlib.metadata.version("deepspeed"), why or "")


def programs() -> Iterator[Finding]:
    """Look for programs that students do not need."""
    for names, package, purpose in OPTIONAL:
        path = next(filter(None, map(shutil.which, names)), None)
        yield Finding(package, path or "no", "" if path else f"nothing, but for {purpose}: apt-get install {package}")


def two_ranks() -> Iterator[Finding]:
    """Start two ranks and let them add two numbers."""
    began_s = time.monotonic()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            ranks.start(world_size=2)
        totals = ranks.run(_total)
    except Exception as error:
        yield Finding("two ranks", "do not work", str(error), needed=True)
        return
    finally:
        ranks.stop()
    took = f"start and add up in {time.monotonic() - began_s:.1f} s"
    right = totals == [3.0, 3.0]
    yield Finding("two ranks", took if right else f"add 1 and 2 up to {totals}", "" if right else "tell us", True)


def _total() -> float:
    import torch
    import torch.distributed as dist

    from shared.ranks import rankside

    total = torch.tensor([dist.get_rank() + 1.0], device=rankside.here.device)
    dist.all_reduce(total)
    return total.item()


LOOKS = (python, packages, loopback, lab_port, resources, gpus, links, peers, programs, two_ranks)


def table(findings: list[Finding]) -> tables.Table:
    rows = [[each.what, each.found, each.advice or "OK"] for each in findings]
    return tables.Table(["", "found", ""], rows)


def main() -> int:
    findings = []
    for look in LOOKS:
        try:
            findings += look()
        except Exception as error:  # on a broken machine, a check may raise anything
            findings.append(Finding(look.__name__, f"{type(error).__name__}: {error}", "could not be looked at", True))
    print(table(findings))
    stopping = [each.what for each in findings if each.stops]
    print(f"\nThe course cannot run yet: {', '.join(stopping)}." if stopping else "\nThe course can run here.")
    return 1 if stopping else 0


if __name__ == "__main__":
    sys.exit(main())
