"""Checks whether the course can run on this machine: `make doctor`, or `python -m shared.ranks.machine`.

Prints one line per check: what was found, then OK or what to do. If something optional is missing, such as a GPU, its
line says what that means. Sentences below the table say what will and what will not work here. The exit status is 1 if
the course cannot run.
"""

import contextlib
import functools
import importlib.metadata
import io
import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from shared import deepspeed_engine, hosts, ranks, tables
from shared.ranks import facts, outlook
from shared.ranks.facts import Facts
from shared.ranks.outlook import Finding

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "jupyterlab", "ipywidgets", "ipyparallel", "matplotlib", "nbval", "pytest")
LAB_PORT = 8888  # the port that JupyterLab tries first
OPTIONAL = (  # the names a program may have, its Debian package, and its purpose
    (("chromium", "chromium-browser", "google-chrome"), "chromium", "the browser tests"),
    (("bwrap",), "bubblewrap", "grading"),
)
MIN_FREE_DISK_GB, MIN_FREE_MEMORY_GB = 1.0, 2.0


def python() -> Iterator[Finding]:
    version, supported = platform.python_version(), (3, 11) <= sys.version_info[:2] <= (3, 14)
    advice = "" if supported else "Install Python 3.11 to 3.14, then run `make lab` again."
    yield Finding("Python", version, advice, required=True)


def packages() -> Iterator[Finding]:
    tested: dict[str, list[str]] = {}
    for file in ("constraints.txt", "constraints-gpu.txt"):
        for name, pinned in (
            line.split("==") for line in (ROOT / file).read_text(encoding="utf-8").splitlines() if "==" in line
        ):
            tested.setdefault(name, []).append(pinned)
    for name in PACKAGES:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "not installed", "Run `make lab`, which installs it.", required=True)
            continue
        advice = f"The course is tested with {' and '.join(tested[name])}. `make lab` installs a tested version."
        yield Finding(name, version, "" if version.split("+")[0] in tested[name] else advice)


def loopback() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname(), 2):
            yield Finding("loopback ports", "open", required=True)
    except OSError as error:
        advice = "Allow processes on this machine to connect to each other on 127.0.0.1."
        yield Finding("loopback ports", str(error), advice, required=True)


def lab_port() -> Iterator[Finding]:
    with contextlib.closing(socket.socket()) as client:
        client.settimeout(2)
        in_use = client.connect_ex(("127.0.0.1", LAB_PORT)) == 0
    advice = "Nothing to do: `make lab` uses the next free port and prints it." if in_use else ""
    yield Finding(f"port {LAB_PORT}", "in use" if in_use else "free", advice)


def resources() -> Iterator[Finding]:
    cores, memory_gb = os.cpu_count() or 1, psutil.virtual_memory().available / 1e9
    advice = "" if cores >= 4 else "4 ranks share them. Values and bytes are exact; compare times only within one run."
    yield Finding("cores", str(cores), advice)
    enough = memory_gb >= MIN_FREE_MEMORY_GB
    advice = "" if enough else f"4 ranks need about {MIN_FREE_MEMORY_GB:g} GB. Close some other programs."
    yield Finding("free memory", f"{memory_gb:.1f} GB", advice, required=True)
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    advice = "" if free_gb >= MIN_FREE_DISK_GB else f"At least {MIN_FREE_DISK_GB:g} GB must be free on this disk."
    yield Finding("free disk", f"{free_gb:.0f} GB", advice, required=True)


@functools.cache
def here() -> Facts:
    """Return the facts about this machine's GPUs, which take seconds to gather."""
    return facts.ask()


def gpus() -> Iterator[Finding]:
    yield from outlook.findings(here())


def links() -> Iterator[Finding]:
    why = hosts.why_not()
    advice = f"{why} Without shaped links, lessons emulate links and say so." if why else ""
    yield Finding("shaped links", "not available" if why else "available", advice)


def deepspeed() -> Iterator[Finding]:
    why = deepspeed_engine.why_not()
    advice = f"{why} It is needed only for comparisons with DeepSpeed." if why else ""
    yield Finding("DeepSpeed", "not installed" if why else importlib.metadata.version("deepspeed"), advice)


def programs() -> Iterator[Finding]:
    """Look for programs that students do not need."""
    for names, package, purpose in OPTIONAL:
        path = next(filter(None, map(shutil.which, names)), None)
        advice = "" if path else f"Needed only for {purpose}: `apt-get install {package}` installs it."
        yield Finding(package, path or "not installed", advice)


def two_ranks() -> Iterator[Finding]:
    """Start two ranks and let them add two numbers with an all-reduce."""
    began_s = time.monotonic()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            ranks.start(world_size=2)
        totals = ranks.run(_total)
    except Exception as error:
        yield Finding("two ranks", "failed", str(error), required=True)
        return
    finally:
        ranks.stop()
    if totals == [3.0, 3.0]:
        took_s = time.monotonic() - began_s
        yield Finding("two ranks", f"started and ran an all-reduce in {took_s:.1f} s", required=True)
    else:
        advice = "Both ranks should have returned 3.0. Please report this as a bug in the course."
        yield Finding("two ranks", f"an all-reduce of 1 and 2 returned {totals}", advice, required=True)


def _total() -> float:
    import torch
    import torch.distributed as dist

    from shared.ranks import rankside

    total = torch.tensor([dist.get_rank() + 1.0], device=rankside.here.device)
    dist.all_reduce(total)
    return total.item()


CHECKS = (python, packages, loopback, lab_port, resources, gpus, links, deepspeed, programs, two_ranks)


def table(findings: list[Finding]) -> tables.Table:
    rows = [[finding.name, finding.found, finding.advice or "OK"] for finding in findings]
    return tables.Table(["check", "found", "what to do"], rows)


def main() -> int:
    findings = []
    for check in CHECKS:
        try:
            findings += check()
        except Exception as error:  # on a broken machine, a check may raise anything
            found, advice = (
                f"{type(error).__name__}: {error}",
                "This check could not run, because it raised the error on the left.",
            )
            findings.append(Finding(check.__name__, found, advice, required=True))
    print(table(findings))
    blocking = [finding.name for finding in findings if finding.blocks]
    if blocking:
        print(f"\nThe course cannot run here yet. Fix these problems first: {', '.join(blocking)}.")
    else:
        print("\nThe course can run here.")
        print("\n".join(f"- {sentence}" for sentence in [*outlook.outlook(here()), *outlook.overridden(os.environ)]))
    return 1 if blocking else 0


if __name__ == "__main__":
    sys.exit(main())
