"""The phases of `make test`: their commands for the chosen tests."""

import sys
from dataclasses import dataclass
from pathlib import Path

from instructor import contents
from shared.deadlines import scaled
from tests import mutation_results
from tests.runner import calibration

ROOT = Path(__file__).resolve().parent.parent.parent
PYTHON = (sys.executable, "-m")
LINT = (
    (*PYTHON, "ruff", "check", "."),
    (*PYTHON, "ruff", "format", "--check", "."),
    (*PYTHON, "tests.spelling"),
    (*PYTHON, "basedpyright", "--project", "pyproject.toml"),
)

MUTANTS = "tests/shared/checks/test_mutants.py"

# Deadlines on an idle machine. They are several times as long as the longest test and cell take there, because other
# programs may start after the time scale was measured.
TEST_S = 300.0
CELL_S = 150.0
KERNEL_START_S = 60.0
STUCK = 1.5  # After this multiple of a test's deadline, its worker is killed, because it did not stop by itself.

QUICK_NOTEBOOKS = ("chapters/00_ranks.ipynb", "solutions/00_ranks_solution.ipynb")
NOTEBOOK_FOLDERS = ("solutions", "chapters")
LESSONS = ("chapters", "solutions/00_ranks_solution.ipynb")  # Unit tests check the other solutions.

# Tests of one file share ranks, and cells of one notebook share a kernel (tests/conftest.py lists exceptions). Without
# the second option, the files with the most tests would come first, not the ones that take longest.
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
# nbval expects the cells after one that timed out to fail. If one passes nevertheless, that is a failure.
STRICT = ("-o", "xfail_strict=true")


@dataclass(frozen=True)
class Phase:
    """A phase of `make test`: commands that must all exit with 0."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    is_pytest: bool = False
    workers: int = 1
    notebooks: tuple[str, ...] = ()  # files or folders; the phase fails if there are none
    mutants_of: tuple[str, ...] = ()  # chapters whose mutants must all be caught and whose variants must all pass
    only: tuple[str, ...] = ()  # the tests to run; by default, all that the commands choose


@dataclass(frozen=True)
class Selection:
    """The chosen tests; by default, all that are not marked `exhaustive`."""

    chapter: str = ""
    quick: bool = False
    exhaustive: bool = False  # with the tests that are marked `exhaustive`
    failed: dict[str, list[str]] | None = None  # tests by phase; an empty list stands for the whole phase
    alone: bool = False  # one test at a time


def pytest_command(*arguments: str, test_s: float = TEST_S) -> tuple[str, ...]:
    """Return a pytest command in which every test has a deadline that fits the machine's load."""
    deadlines = [f"--timeout={scaled(test_s):g}", "--timeout-method=signal"]
    deadlines += ["-o", f"faulthandler_timeout={scaled(STUCK * test_s):g}", "-o", "faulthandler_exit_on_timeout=true"]
    return (*PYTHON, "pytest", "-p", "tests.runner.plugin", "-q", "-p", "no:cacheprovider", *deadlines, *arguments)


def lint(selection: Selection) -> Phase:
    if not selection.chapter:
        return Phase("lint", LINT)
    *others, types = LINT
    return Phase("lint", (*others, (*types[: types.index("--project")], *typed_files(selection.chapter))))


def typed_files(chapter: str) -> list[str]:
    """Return what pyright reads for a chapter: its checks and solutions. All of the course takes half a minute."""
    from instructor import build  # Other runs start faster without it.

    names = build.module_names(next(each for each in build.chapters() if each.name == chapter))
    paths = [f"shared/checks/{names[0]}", *(f"solutions/{name}.py" for name in names)]
    return [path for path in paths if (ROOT / path).exists()]


def unit(selection: Selection) -> Phase:
    only = tuple(selection.failed["unit"]) if selection.failed else ()
    # Two workers leave two cores idle a third of the time. With all mutants, which often hang, even three do.
    more = 2 if selection.exhaustive else 1
    workers = 1 if selection.alone else calibration.workers(calibration.cores() + more)
    command = pytest_command(*(files_of(only) or ["tests"]), "-n", str(workers), *BY_FILE, "-m", marks(selection))
    mutants_of: tuple[str, ...] = ()
    if selection.chapter:
        command += ("--chapter", selection.chapter)
        mutants_of = (selection.chapter,)
    elif selection.exhaustive:
        mutants_of = tuple(mutation_results.chapter_names())
    if selection.chapter or selection.exhaustive:  # The notebooks of our solutions run.
        command += ("--deselect", f"{MUTANTS}::test_our_own_solution_passes")
    if only:
        mutants_of = ()  # a few tests say nothing about all mutants
    return Phase("unit", (command,), is_pytest=True, workers=workers, mutants_of=mutants_of, only=only)


def marks(selection: Selection) -> str:
    """Return the marks of the chosen tests, as pytest expects them."""
    if selection.quick:
        return "not gpu and not slow and not exhaustive"
    whole = selection.exhaustive or selection.chapter or selection.failed
    return "not gpu" if whole else "not gpu and not exhaustive"


def notebooks(selection: Selection) -> Phase:
    chosen: tuple[str, ...] = NOTEBOOK_FOLDERS if selection.exhaustive or selection.failed else LESSONS
    if selection.failed and selection.failed["notebooks"]:
        chosen = tuple(files_of(selection.failed["notebooks"])) or NOTEBOOK_FOLDERS  # A cell needs the cells before it.
    elif selection.chapter:
        chosen = tuple(contents.notebook(folder, selection.chapter) for folder in NOTEBOOK_FOLDERS)
    elif selection.quick:
        chosen = QUICK_NOTEBOOKS
    # Notebooks often wait for their ranks to start.
    workers = 1 if selection.alone else calibration.workers(calibration.cores() + 1)
    if chosen not in (NOTEBOOK_FOLDERS, LESSONS):
        workers = min(workers, len(chosen))
    options = [f"--nbval-cell-timeout={scaled(CELL_S):g}", f"--nbval-kernel-startup-timeout={scaled(KERNEL_START_S):g}"]
    command = pytest_command("--nbval", *options, *chosen, "-n", str(workers), *BY_FILE, *STRICT)
    return Phase("notebooks", (command,), is_pytest=True, workers=workers, notebooks=chosen)


BUILDERS = {"lint": lint, "unit": unit, "notebooks": notebooks}


def files_of(tests: tuple[str, ...] | list[str]) -> list[str]:
    """Return the files of these tests that still exist."""
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    return [file for file in files if (ROOT / file).exists()]
