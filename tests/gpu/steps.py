"""The steps of `make gpu` and their parts: what runs on a machine, and what is skipped there and why."""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from instructor import contents
from shared.deadlines import scaled
from tests.needs_nccl import check_needs_nccl, needs_nccl

ROOT = Path(__file__).resolve().parents[2]
RESULT = "{folder}"  # in a command, stands for the folder in which its results are expected
KEPT = "{kept}"  # in a command, stands for the folder of the whole run's results, for files that are results themselves
LESSONS_RANKS = 4
GRACE_S = scaled(5.0)  # after a command has ended, its processes may take this long to end
GPU_GRACE_S = scaled(20.0)  # a process that has used CUDA needs longer, especially if several end at once
DRY_CHECKS = "first_collectives"
SCRIPTS = {"chapters": "lesson.py", "solutions": "lab.py"}  # the source of the notebooks in a folder

# Packages that have another name on PyPI than in Python.
DISTRIBUTIONS = {"IPython": "ipython", "pytest_timeout": "pytest-timeout", "sklearn": "scikit-learn"}
RANKS = ("torch", "numpy", "psutil", "IPython", "ipyparallel", "ipykernel", "jinja2")
TESTS = (*RANKS, "pytest", "pytest_timeout", "matplotlib")
NOTEBOOKS = (*TESTS, "nbval", "ipywidgets", "sklearn")

TITLES = {
    "start": "Ranks start, run cells, report errors and leave no process",
    "nccl-semantics": "NCCL behaves towards the host as its simulation claims",
    "traces": "One step of four strategies is recorded for a trace viewer",
    "tests": "The tests marked gpu pass",
    "checks": "Every solution passes its checks",
    "notebooks": "The lessons and the solved labs run",
    "benchmark": "Time, memory and MFU of every strategy beside PyTorch's own",
}


@dataclass(frozen=True)
class Part:
    """A part of a step: one command with a deadline of its own, or the reason why it is skipped."""

    step: str
    name: str
    command: tuple[str, ...] = ()
    deadline_s: float = 600.0
    grace_s: float = GRACE_S
    reads: str = "report"  # which of the READERS in running.py reads the results of the command
    packages: tuple[str, ...] = RANKS
    environment: dict[str, str] = field(default_factory=dict)
    skip: str = ""

    @property
    def missing(self) -> list[str]:
        """Return the packages that the part needs and this Python lacks."""
        return [DISTRIBUTIONS.get(name, name) for name in self.packages if find_spec(name) is None]


@dataclass(frozen=True)
class Machine:
    """What the steps need to know about a machine."""

    gpus: int
    exclusive: bool = False
    dry: bool = False

    @property
    def name_gpus(self) -> str:
        return f"{self.gpus} GPU" + ("s" if self.gpus != 1 else "")


def parts(machine: Machine) -> list[Part]:
    """Return all parts of all steps, the most important ones first."""
    found = [part for step in STEPS for part in step(machine)]
    assert {part.step for part in found} == set(TITLES)
    return found if machine.dry else [replace(part, grace_s=GPU_GRACE_S) for part in found]


def program(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command of one of our programs. When it runs out of time, it prints where it is."""
    return (sys.executable, "-X", "faulthandler", "-m", name, *arguments)


def pytest_command(*arguments: str) -> tuple[str, ...]:
    events = ("-p", "tests.runner.plugin", "--events", f"{RESULT}/events")
    return program("pytest", "-q", "-p", "no:cacheprovider", *events, *arguments)


# -- the steps


def start(machine: Machine) -> Iterator[Part]:
    """Start ranks in every way that this machine allows."""

    def part(name: str, ranks: int, device: str, *options: str, skip: str = "") -> Part:
        command = program("tests.gpu.starting", "--result", f"{RESULT}/report.json", "--ranks", str(ranks), *options)
        return Part("start", name, (*command, "--device", device), deadline_s=240.0, skip=skip)

    if machine.dry:
        yield part("gloo on the CPU, 2 ranks", 2, "cpu", "--backend", "gloo:cpu")
        yield part("simulated NCCL, 2 ranks", 2, "cpu", "--simulate")
        return
    yield part("NCCL, 1 rank", 1, "cuda", "--backend", "nccl")
    if machine.gpus == 1:
        yield part("NCCL, 2 ranks", 2, "cuda", skip="NCCL needs one GPU per rank, and this machine has 1 GPU")
    else:
        yield part(f"NCCL, {machine.gpus} ranks", machine.gpus, "cuda", "--backend", "nccl")
    alone = "the compute mode lets only one process at a time use a GPU" if machine.exclusive else ""
    for ranks in (2, 4):
        yield part(f"gloo on the GPU, {ranks} ranks", ranks, "cuda", "--backend", "gloo", skip=alone)
        yield part(f"gloo on the CPU, {ranks} ranks", ranks, "cpu", "--backend", "gloo:cpu")


def semantics(machine: Machine) -> Iterator[Part]:
    """Compare NCCL with the claims of its simulation. In a dry run, the simulation is compared with itself."""

    def part(probe: str, name: str, ranks: int, *options: str) -> Part:
        command = program("tests.gpu.semantics", probe, "--result", f"{RESULT}/report.json", "--ranks", str(ranks))
        skip = "" if machine.dry or ranks <= machine.gpus else f"it needs {ranks} GPUs, and this machine has "
        skip = skip and skip + machine.name_gpus
        simulated = ("--simulate",) if machine.dry else ()
        packages = ("torch", "psutil")
        return Part("nccl-semantics", name, (*command, *options, *simulated), 240.0, packages=packages, skip=skip)

    if machine.dry:
        yield part("stream", "host and stream, 2 ranks", 2)
        return
    yield part("stream", "host and stream, 1 rank", 1)
    yield part("stream", "host and stream, 2 ranks", 2)
    yield part("alone", "a rank alone in a collective", 2)
    yield part("ring", "unbatched ring", 3)
    yield part("ring", "unbatched ring, communicator built at the start", 3, "--eager")


def traces(machine: Machine) -> Iterator[Part]:
    """Record one training step of four strategies on two ranks. The program itself finds out whether they get NCCL."""
    command = program("tests.gpu.traces", "--result", f"{RESULT}/report.json", "--folder", KEPT)
    dry = ("--dry", "--backend", "gloo:cpu") if machine.dry else ()
    alone = machine.exclusive and machine.gpus < 2 and not machine.dry
    skip = "the compute mode lets only one process at a time use a GPU" if alone else ""
    yield Part("traces", "four strategies, 2 ranks", (*command, *dry), 300.0, skip=skip)


def gpu_tests(machine: Machine) -> Iterator[Part]:
    """Run the tests marked gpu, one file at a time."""
    marked = re.compile(r"^(?:@|pytestmark = .*)pytest\.mark\.gpu\b", re.MULTILINE)
    found = [path for path in sorted((ROOT / "tests").glob("test_*.py")) if marked.search(path.read_text())]
    for path in found[:1] if machine.dry else found:
        command = pytest_command("-m", "gpu", "--timeout=300", str(path.relative_to(ROOT)))
        yield Part("tests", path.stem, command, reads="pytest", packages=TESTS)


def checks(machine: Machine) -> Iterator[Part]:
    """Run every solution's checks, which use up to four ranks."""
    folder = ROOT / "shared" / "checks"
    names = [path.stem for path in sorted((ROOT / "solutions").glob("*.py")) if (folder / path.stem).is_dir()]
    for name in [DRY_CHECKS] if machine.dry else names:
        source = ROOT / "solutions" / f"{name}.py"
        command = program("shared.checks", name, str(source.relative_to(ROOT)), "--json")
        where = place(machine, needs_nccl(source.read_text()) or check_needs_nccl(name))
        yield Part("checks", name + where.note, command, reads="checks", environment=where.environment)


def notebooks(machine: Machine) -> Iterator[Part]:
    """Execute the lessons and the solved labs. Outputs are not compared: devices and last digits differ on a GPU."""
    found = sorted(path for folder in SCRIPTS for path in (ROOT / folder).glob("*.ipynb"))
    for path in found[:1] if machine.dry else found:
        folder = path.parent.name
        source = ROOT / "source" / contents.folder_of(path) / SCRIPTS[folder]
        where = place(machine, needs_nccl(source.read_text()))
        # After a cell that hung, nbval expects the others to fail. If one passes nevertheless, that is a failure.
        options = ("--nbval-lax", "--nbval-cell-timeout=300", "-o", "xfail_strict=true")
        command = pytest_command(*options, str(path.relative_to(ROOT)))
        name = f"{folder}/{path.stem}{where.note}"
        yield Part("notebooks", name, command, reads="pytest", packages=NOTEBOOKS, environment=where.environment)


@dataclass(frozen=True)
class Where:
    """Where the ranks of a part run: a note in its name, and what the environment must say."""

    note: str = ""
    environment: dict[str, str] = field(default_factory=dict)


def place(machine: Machine, only_with_nccl: bool) -> Where:
    """Put four ranks on their own GPUs, else on shared GPUs if they do not need NCCL, else on the CPU."""
    on_cpu = {"RANKS_BACKEND": "gloo:cpu"}
    if machine.dry:
        return Where("", on_cpu)
    if machine.gpus >= LESSONS_RANKS:
        return Where()
    if machine.exclusive or only_with_nccl:
        return Where(" (on the CPU)", on_cpu)
    return Where("", {"RANKS_BACKEND": "gloo"})


def benchmark(machine: Machine) -> Iterator[Part]:
    command = program("benchmarks.gpu", "--folder", RESULT, *(("--dry",) if machine.dry else ()))
    packages = (*RANKS, "matplotlib")
    yield Part("benchmark", "all strategies", command, 1800.0, reads="benchmark", packages=packages)


STEPS = (start, semantics, traces, gpu_tests, checks, notebooks, benchmark)
