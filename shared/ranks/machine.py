"""Checks whether the course can run on this machine: `make doctor`, or `python -m shared.ranks.machine`.

Prints a line as soon as something is known: what was found, then OK or what to do. If something optional is missing,
such as a GPU, its line says what that means. Sentences below the lines say what will and what will not work here. A
check that hangs is left behind after its deadline. The exit status is 1 if the course cannot run.
"""

import contextlib
import functools
import importlib.metadata
import io
import os
import platform
import queue
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from shared import deepspeed_engine, hosts, ranks
from shared.deadlines import scaled
from shared.ranks import containers, devices, facts, outlook
from shared.ranks.facts import Facts
from shared.ranks.outlook import Finding

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "cloudpickle", "jupyterlab", "ipywidgets", "matplotlib", "nbval", "pytest")
LAB_PORT = 8888  # the port that JupyterLab tries first
OPTIONAL = (  # the names a program may have, its Debian package, and its purpose
    (("chromium", "chromium-browser", "google-chrome"), "chromium", "the browser tests"),
    (("bwrap",), "bubblewrap", "grading"),
)
USER_NAMESPACES = (  # a setting below /proc/sys, the values with which it forbids and allows them, and who does that
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "0", "AppArmor"),
    ("kernel/unprivileged_userns_clone", "0", "1", "the system"),
    ("user/max_user_namespaces", "0", "10000", "the system"),
)
ANSWERS_WITHIN_S = 30.0
LINE = "{:<18}  {:<34}  {}"
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


def own_name() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        socket.gethostbyname(name)
    except OSError:
        advice = f"Ranks do not need it, but torchrun does: add the line `127.0.0.1 {name}` to /etc/hosts."
        yield Finding("own name", f"{name} has no address", advice)
    else:
        yield Finding("own name", name)


def interface() -> Iterator[Finding]:
    """Look for the interface that a cluster's environment names for gloo."""
    name, known = os.environ.get("GLOO_SOCKET_IFNAME"), [name for _, name in socket.if_nameindex()]
    if name and not set(name.split(",")) <= set(known):
        advice = f"Ranks ignore it, but torchrun does not: unset it, or choose one of {', '.join(known)}."
        yield Finding("GLOO_SOCKET_IFNAME", f"{name}, which is no interface here", advice)
    elif name:
        yield Finding("GLOO_SOCKET_IFNAME", name, "Nothing to do: ranks use loopback instead, and torchrun uses it.")


def lab_port() -> Iterator[Finding]:
    with contextlib.closing(socket.socket()) as client:
        client.settimeout(2)
        in_use = client.connect_ex(("127.0.0.1", LAB_PORT)) == 0
    advice = "Nothing to do: `make lab` uses the next free port and prints it." if in_use else ""
    yield Finding(f"port {LAB_PORT}", "in use" if in_use else "free", advice)


def resources() -> Iterator[Finding]:
    cores = os.cpu_count() or 1
    advice = "" if cores >= 4 else "4 ranks share them. Values and bytes are exact; compare times only within one run."
    yield Finding("cores", str(cores), advice)
    yield _memory()
    free_gb = shutil.disk_usage(ROOT).free / 1e9
    advice = "" if free_gb >= MIN_FREE_DISK_GB else f"At least {MIN_FREE_DISK_GB:g} GB must be free on this disk."
    yield Finding("free disk", f"{free_gb:.0f} GB", advice, required=True)


def _memory() -> Finding:
    left_bytes, free_bytes = containers.left_bytes(), psutil.virtual_memory().available
    if left_bytes is None:
        advice = f"4 ranks need about {MIN_FREE_MEMORY_GB:g} GB. Close some other programs."
        return Finding("free memory", f"{free_bytes / 1e9:.1f} GB", _below(free_bytes) * advice, required=True)
    found = f"{left_bytes / 1e9:.1f} GB in this container"
    advice = _below(left_bytes) * f"Let the container use {MIN_FREE_MEMORY_GB:g} GB, as by `docker run --memory=2g`."
    return Finding("free memory", found, advice, required=left_bytes < containers.needed_bytes())


def _below(free_bytes: int) -> bool:
    return free_bytes < MIN_FREE_MEMORY_GB * 1e9


def open_files() -> Iterator[Finding]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = devices.open_files(4)
    enough = most >= needed or most == resource.RLIM_INFINITY
    found = "no limit" if most == resource.RLIM_INFINITY else f"up to {most}"
    advice = "" if enough else f"4 ranks need {needed}. As root, `ulimit -Hn {needed}` raises the limit of a shell."
    yield Finding("open files", found, advice, required=True)


def namespaces(settings: Path = Path("/proc/sys")) -> Iterator[Finding]:
    """Say whether ordinary users may make user namespaces, which grading and shaped links need."""
    if sys.platform != "linux" or os.geteuid() == 0:
        return
    for name, forbids, allows, by_whom in USER_NAMESPACES:
        setting = settings / name
        if setting.exists() and setting.read_text(encoding="utf-8").strip() == forbids:
            command = f"`sudo sysctl {name.replace('/', '.')}={allows}`"
            advice = f"Needed only for grading and shaped links: {command} allows them."
            yield Finding("user namespaces", f"forbidden by {by_whom}", advice)
            return
    yield Finding("user namespaces", "allowed")


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


CHECKS = (
    *(python, packages, loopback, own_name, interface, lab_port, resources, open_files),
    *(gpus, namespaces, links, deepspeed, programs, two_ranks),
)
DEADLINES_S = {own_name: 5.0, gpus: facts.ANSWER_S + ANSWERS_WITHIN_S, two_ranks: 240.0}  # others: ANSWERS_WITHIN_S


def answers(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Yield what a check finds until its deadline. It runs in a thread, because some system calls cannot be stopped."""
    found: queue.SimpleQueue[Finding | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            for finding in check():
                found.put(finding)
        except Exception as error:  # on a broken machine, a check may raise anything
            advice = "This check could not run, because it raised the error on the left."
            found.put(Finding(check.__name__, f"{type(error).__name__}: {error}", advice, required=True))
        found.put(None)

    threading.Thread(target=run, daemon=True).start()
    deadline_s = scaled(DEADLINES_S.get(check, ANSWERS_WITHIN_S))
    ends_s = time.monotonic() + deadline_s
    try:
        while (finding := found.get(timeout=max(0.0, ends_s - time.monotonic()))) is not None:
            yield finding
    except queue.Empty:
        advice = "This check gave no answer, so we do not know about it."
        if check is own_name:
            advice = "Ranks do not need this machine's own name, but torchrun waits for it: add it to /etc/hosts."
        name = check.__name__.replace("_", " ")
        yield Finding(name, f"no answer within {deadline_s:g} s", advice, required=check is two_ranks)


def main() -> int:
    output, blocking = sys.stdout, []  # A check that hangs may have redirected it.
    print(LINE.format("check", "found", "what to do"), flush=True)
    for check in CHECKS:
        for finding in answers(check):
            print(LINE.format(finding.name, finding.found, finding.advice or "OK"), file=output, flush=True)
            blocking += [finding.name] if finding.blocks else []
    if blocking:
        print(f"\nThe course cannot run here yet. Fix these problems first: {', '.join(blocking)}.", file=output)
    else:
        print("\nThe course can run here.", file=output)
        sentences = [*outlook.outlook(here()), *outlook.overridden(os.environ)]
        print("\n".join(f"- {sentence}" for sentence in sentences), file=output)
    return 1 if blocking else 0


if __name__ == "__main__":
    sys.exit(main())
