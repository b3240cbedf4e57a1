"""The steps of `make gpu` and their parts: what runs on a machine, and what is skipped there and why."""

import importlib.util
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

from shared.deadlines import scaled

ROOT = Path(__file__).resolve().parents[2]


def alone(name: str):
    """Load a file of shared/ranks/ without its package, which needs more than Python."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "shared" / "ranks" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # `dataclass` looks there
    spec.loader.exec_module(module)
    return module


nccl = alone("nccl")
RESULT = "{folder}"  # in a command, stands for the folder in which its results are expected
KEPT = "{kept}"  # in a command, stands for the folder of the whole run's results, which keeps the files
LESSONS_RANKS = 4
GRACE_S = scaled(5.0)  # after a command has ended, its processes may take this long to end
GPU_GRACE_S = scaled(20.0)  # a process that has used CUDA needs longer, especially if several end at once
DRY_CHECKS, DRY_NOTEBOOK = "first_collectives", "00_ranks_solution"  # a dry run has only these
FIRST_CHECKS = ("collectives", "overlapped_ddp", "zero3", "pipeline")  # a short run should contain these
NOTEBOOK_FOLDERS = ("chapters", "solutions")

# Packages that have another name on PyPI than in Python.
DISTRIBUTIONS = {"IPython": "ipython", "pytest_timeout": "pytest-timeout", "sklearn": "scikit-learn"}
RANKS = ("torch", "cloudpickle", "numpy", "psutil", "IPython", "ipykernel", "jinja2")
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
    turn: int = 1  # parts with a lower number run first, because they show more

    @property
    def missing(self) -> list[str]:
        """Return the packages that the part needs and this Python lacks."""
        return [DISTRIBUTIONS.get(name, name) for name in self.packages if find_spec(name) is None]


@dataclass(frozen=True)
class Machine:
    """What the steps need to know about a machine."""

    gpus: int
    nccl_ranks: int = 0  # how many ranks can use NCCL; more than there are GPUs if ranks can share them
    exclusive: bool = False
    dry: bool = False

    @property
    def name_gpus(self) -> str:
        return f"{self.gpus} GPU" + ("s" if self.gpus != 1 else "")

    @property
    def shares(self) -> bool:
        return self.nccl_ranks > self.gpus


def parts(machine: Machine) -> list[Part]:
    """Return all parts of all steps, those that show most first."""
    found = [part for step in STEPS for part in step(machine)]
    assert {part.step for part in found} == set(TITLES)
    found.sort(key=lambda part: part.turn)
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

    def part(name: str, ranks: int, device: str, *options: str, skip: str = "", turn: int = 0) -> Part:
        command = program("tests.gpu.starting", "--result", f"{RESULT}/report.json", "--ranks", str(ranks), *options)
        return Part("start", name, (*command, "--device", device), deadline_s=240.0, skip=skip, turn=turn)

    if machine.dry:
        yield part("simulated NCCL, 2 ranks", 2, "cpu", "--simulate")
        return
    yield part("NCCL, 1 rank", 1, "cuda", "--backend", "nccl")
    if machine.gpus > 1:
        yield part(f"NCCL, {machine.gpus} ranks", machine.gpus, "cuda", "--backend", "nccl")
    for ranks in (ranks for ranks in (2, 4) if ranks > machine.gpus):
        skip = "" if ranks <= machine.nccl_ranks else f"this NCCL cannot run {ranks} ranks on {machine.name_gpus}"
        yield part(f"NCCL on shared GPUs, {ranks} ranks", ranks, "cuda", "--backend", "nccl:shared", skip=skip)
    alone = "the compute mode lets only one process at a time use a GPU" if machine.exclusive else ""
    for ranks in (2, 4):
        yield part(f"gloo on the GPU, {ranks} ranks", ranks, "cuda", "--backend", "gloo", skip=alone, turn=2)
        yield part(f"gloo on the CPU, {ranks} ranks", ranks, "cpu", "--backend", "gloo:cpu", turn=2)


def semantics(machine: Machine) -> Iterator[Part]:
    """Compare NCCL with the claims of its simulation. In a dry run, the simulation is compared with itself."""

    def part(probe: str, name: str, ranks: int, *options: str) -> Part:
        command = program("tests.gpu.semantics", probe, "--result", f"{RESULT}/report.json", "--ranks", str(ranks))
        fits = machine.dry or ranks <= max(machine.gpus, machine.nccl_ranks)
        skip = "" if fits else f"it needs {ranks} GPUs, and this machine has {machine.name_gpus}"
        shares = ranks > machine.gpus and not machine.dry
        environment = nccl.environment(-(-ranks // machine.gpus)) | nccl.preloading() if shares else {}
        simulated = ("--simulate",) if machine.dry else ()
        command = (*command, *options, *simulated)
        return Part(
            *("nccl-semantics", name, command, 240.0),
            packages=("torch", "psutil"),
            environment=environment,
            skip=skip,
            turn=("stream", "alone", "ring").index(probe),
        )

    if machine.dry:
        yield part("stream", "host and stream, 2 ranks", 2)
        return
    yield part("stream", "host and stream, 1 rank", 1)
    yield part("stream", "host and stream, 2 ranks", 2)
    yield part("alone", "a rank alone in a collective", 2)
    yield part("ring", "unbatched ring", 3)
    yield part("ring", "unbatched ring, communicator built at the start", 3, "--eager")


def traces(machine: Machine) -> Iterator[Part]:
    """Record one training step of four strategies on two ranks, for which ranks.start chooses the kind of NCCL."""
    command = program("tests.gpu.traces", "--result", f"{RESULT}/report.json", "--folder", KEPT)
    dry = ("--dry", "--backend", "gloo:cpu") if machine.dry else ()
    skip = "" if machine.dry or machine.nccl_ranks >= 2 else f"this NCCL cannot run 2 ranks on {machine.name_gpus}"
    yield Part("traces", "four strategies, 2 ranks", (*command, *dry), 300.0, skip=skip)


def gpu_tests(machine: Machine) -> Iterator[Part]:
    """Run the tests marked gpu, one file at a time."""
    marked = re.compile(r"^(?:@|pytestmark = .*)pytest\.mark\.gpu\b", re.MULTILINE)
    found = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if marked.search(path.read_text())]
    for path in found[:1] if machine.dry else found:
        command = pytest_command("-m", "gpu", "--timeout=300", str(path.relative_to(ROOT)))
        yield Part("tests", path.stem, command, reads="pytest", packages=TESTS, turn=0 if "gpu" in path.stem else 1)


def checks(machine: Machine) -> Iterator[Part]:
    """Run every solution's checks, which use up to four ranks."""
    folder = ROOT / "shared" / "checks"
    names = [path.stem for path in sorted((ROOT / "solutions").glob("*.py")) if (folder / path.stem).is_dir()]
    note, environment = place(machine)
    for name in [DRY_CHECKS] if machine.dry else names:
        source = ROOT / "solutions" / f"{name}.py"
        command = program("shared.checks", name, str(source.relative_to(ROOT)), "--json")
        turn = 0 if name in FIRST_CHECKS else 1
        yield Part("checks", name + note, command, reads="checks", environment=environment, turn=turn)


def notebooks(machine: Machine) -> Iterator[Part]:
    """Execute the lessons and the solved labs. Outputs are not compared: devices and last digits differ on a GPU."""
    found = sorted(path for folder in NOTEBOOK_FOLDERS for path in (ROOT / folder).glob("*.ipynb"))
    note, environment = place(machine)
    for path in [path for path in found if path.stem == DRY_NOTEBOOK] if machine.dry else found:
        # After a cell that hung, nbval expects the others to fail. If one passes nevertheless, that is a failure.
        options = ("--nbval-lax", "--nbval-cell-timeout=300", "-o", "xfail_strict=true")
        command = pytest_command(*options, str(path.relative_to(ROOT)))
        name = f"{path.parent.name}/{path.stem}{note}"
        options = {"reads": "pytest", "packages": NOTEBOOKS, "environment": environment}
        yield Part("notebooks", name, command, **options, turn=1 if path.stem.startswith("00") else 2)


def place(machine: Machine) -> tuple[str, dict[str, str]]:
    """Run four ranks as in a student's notebook: with NCCL where it can run four, else on the CPU.

    Returns:
        A note for the names of parts, and the variables of their environment.
    """
    if machine.dry:
        return "", {"RANKS_BACKEND": "gloo:cpu"}
    if max(machine.gpus, machine.nccl_ranks) >= LESSONS_RANKS:
        return "", {}
    return " (on the CPU)", {"RANKS_BACKEND": "gloo:cpu"}


def benchmark(machine: Machine) -> Iterator[Part]:
    options = ("--dry",) if machine.dry else ("--state-share", "0.1")
    command = program("benchmarks.gpu", "--folder", RESULT, *options)
    packages = (*RANKS, "matplotlib")
    yield Part("benchmark", "all strategies", command, 1800.0, reads="benchmark", packages=packages)


STEPS = (start, semantics, traces, gpu_tests, checks, notebooks, benchmark)
