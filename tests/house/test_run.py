"""`make test` says what is running and why something failed, and it does not hang when a test does."""

import contextlib
import io
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import nbformat
import psutil
import pytest

from shared import deadlines
from tests import mutation_results, run
from tests.runner import calibration, execution, phases, plugin, progress
from tests.runner.execution import Result, run_command, run_phase
from tests.runner.phases import PYTHON, ROOT, Phase, Selection
from tests.runner.record import Record
from tests.runner.results import Outcome, Results
from tests.runner.summary import summary
from tests.shared.checks import test_mutants

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # most of these tests run pytest on a toy

# Without the plugins that would take two seconds to load.
TOY_PYTEST = ("env", f"PYTHONPATH={ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", *PYTHON, "pytest", "-q", "--rootdir=.")
TOY_PYTEST += ("-p", "pytest_timeout", "-p", "tests.runner.plugin", "-p", "no:cacheprovider")


def toy_phase(tmp_path: Path, source: str, *options: str, **fields) -> Result:
    """Run a phase of one pytest file."""
    (tmp_path / "test_it.py").write_text(source)
    return run_phase(Phase("unit", ((*TOY_PYTEST, "test_it.py", *options),), is_pytest=True, **fields), tmp_path)


def python_phase(*sources: str) -> Phase:
    return Phase("lint", tuple((sys.executable, "-c", source) for source in sources))


def outcomes_of(result: Result) -> dict[str, str]:
    """Return the outcome of each test by its name."""
    return {test.name.split("::")[-1]: test.verdict for test in result.tests.tests.values()}


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended, even if its parent has not collected it yet."""
    try:
        psutil.Process(pid).wait(deadlines.scaled(10))
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


# --- outcomes of a phase ----------------------------------------------------------------------------

OUTCOMES = """
import pytest

def test_passes(): pass
def test_fails(): assert 1 + 1 == 3, "arithmetic"
@pytest.mark.skip(reason="not today")
def test_skipped(): pass
@pytest.fixture
def broken(): raise OSError("no disk")
def test_error(broken): pass
@pytest.fixture
def leaves_badly():
    yield
    raise ValueError("too late")
def test_bad_end(leaves_badly): pass
"""


def test_every_outcome_is_counted_and_shown_with_its_reason(tmp_path, capfd):
    """A failure is shown at once, and its traceback at the end."""
    result = toy_phase(tmp_path, OUTCOMES)
    assert result.counts == {"passed": 1, "failed": 3, "skipped": 1}
    assert result.problem == "3 of 4 tests failed"
    reasons = {test.name.split("::")[-1]: test.reason for test in result.tests.tests.values()}
    assert reasons["test_fails"] == "test_it.py:5: AssertionError: arithmetic assert (1 + 1) == 3"
    assert reasons["test_error"] == "test_it.py:9: OSError: no disk"
    assert reasons["test_bad_end"] == "test_it.py:14: ValueError: too late"
    assert reasons["test_skipped"] == "Skipped: not today"
    shown = capfd.readouterr().out.splitlines()
    assert f"FAILED test_it.py::test_fails · {reasons['test_fails']}" in shown
    assert any("FAILURES" in line for line in shown)
    assert any(line.startswith("E ") and line.endswith("AssertionError: arithmetic") for line in shown)


def test_a_phase_that_passes_prints_no_traceback(tmp_path, capfd):
    result = toy_phase(tmp_path, "def test_passes(): pass")
    assert (result.problem, result.counts) == (None, {"passed": 1})
    assert capfd.readouterr().out.strip() == "── unit ──"


@pytest.mark.parametrize("source", ["", "import pytest\n@pytest.mark.skip\ndef test_skipped(): pass"])
def test_a_phase_in_which_no_test_ran_fails(tmp_path, source):
    result = toy_phase(tmp_path, source)
    assert result.problem is not None and result.counts["failed"] == 1


def test_a_file_that_cannot_be_imported_is_a_failure_with_a_reason(tmp_path):
    result = toy_phase(tmp_path, "import nothing_like_it")
    assert outcomes_of(result) == {"test_it.py": "failed"}
    assert "No module named 'nothing_like_it'" in result.tests.failed[0].reason


def test_a_phase_fails_if_its_tests_pass_but_pytest_fails(tmp_path):
    source = "import atexit, os\ndef test_passes(): atexit.register(os._exit, 3)"
    result = toy_phase(tmp_path, source)
    assert result.problem == "exit code 3" and result.counts == {"passed": 1, "failed": 1}


def test_every_command_of_a_phase_runs_and_must_succeed(tmp_path):
    result = run_phase(python_phase("exit(3)", "open('ran', 'w')"), tmp_path)
    assert result.problem == "exit code 3" and (tmp_path / "ran").exists()


def test_commands_find_the_programs_of_this_environment(tmp_path):
    source = f"import os; exit(os.environ['PATH'].split(os.pathsep)[0] != {str(Path(sys.prefix) / 'bin')!r})"
    assert run_phase(python_phase(source), tmp_path).problem is None


def test_a_make_inside_a_test_does_not_take_over_the_arguments_of_this_one(tmp_path, monkeypatch):
    monkeypatch.setenv("ALL", "1")
    monkeypatch.setenv("MAKEFLAGS", "--dry-run")
    source = "import os; exit('ALL' in os.environ or 'MAKEFLAGS' in os.environ)"
    assert run_phase(python_phase(source), tmp_path).problem is None


# --- hanging tests ----------------------------------------------------------------------------------

HANGS = """
import time

import pytest
from shared import ranks

long = pytest.mark.timeout({long:g})

@pytest.fixture
def hangs_at_its_end():
    yield
    time.sleep(600)

def count(): return 1

def test_hangs(): time.sleep(600)
def test_next(): pass
def test_fails(hangs_at_its_end): assert 0
@long
def test_ranks_start(): ranks.start(2)
def test_ranks_hang(): ranks.run(time.sleep, 600, timeout_s=600)
@long
def test_ranks_are_replaced(): assert ranks.run(count) == [1, 1]
"""


def test_a_test_that_hangs_ends_at_its_deadline_and_the_next_one_runs(tmp_path):
    """So does a test whose teardown hangs after it failed. Ranks that hang are replaced."""
    result = toy_phase(tmp_path, HANGS.format(long=deadlines.scaled(60)), "--timeout=1")
    names = ["test_hangs", "test_next", "test_fails", "test_ranks_start", "test_ranks_hang", "test_ranks_are_replaced"]
    assert outcomes_of(result) == dict(zip(names, ["failed", "passed"] * 3, strict=True))
    assert result.tests.failed[0].reason == "test_it.py:16: Failed: Timeout (>1.0s) from pytest-timeout."


def test_a_worker_that_does_not_react_is_replaced(tmp_path):
    """Python runs no signal handler during a call into C. A blocked signal simulates such a call."""
    source = """
import signal, time

def test_passes(): pass
def test_does_not_react():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)
def test_next(): pass
"""
    options = ("-p", "xdist", "-n", "1", "--timeout=1", "-o", "faulthandler_timeout=2")
    result = toy_phase(tmp_path, source, *options, "-o", "faulthandler_exit_on_timeout=true")
    assert outcomes_of(result) == {"test_passes": "passed", "test_does_not_react": "failed", "test_next": "passed"}
    assert "crashed while running 'test_it.py::test_does_not_react'" in result.tests.failed[0].reason


def write_notebook(path: Path, *sources: str) -> None:
    cells = [nbformat.v4.new_code_cell(source, execution_count=1) for source in sources]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    path.parent.mkdir(exist_ok=True)
    nbformat.write(notebook, path)


ENDLESS = """
import os, time
open("pid", "w").write(str(os.getpid()))
while True:
    try:
        print(os.getpid(), flush=True)
        time.sleep(0.5)
    except KeyboardInterrupt:
        pass
"""
ENDS_SOON = """
import pytest

def pytest_collection_modifyitems(items):
    for cell in items:
        if (cell.path.name, cell.name) == ("endless.ipynb", "Cell 1"):
            cell.add_marker(pytest.mark.timeout({seconds}))
"""


def test_a_cell_that_hangs_fails_and_so_do_the_cells_after_it(tmp_path):
    """nbval waits as long as a kernel prints. If it also ignores interrupts, it is ended at the test's deadline."""
    solutions, cell_s = tmp_path / "solutions", deadlines.scaled(3)
    write_notebook(solutions / "hangs.ipynb", "x = 1", "import time\ntime.sleep(600)", "x = 1")
    write_notebook(solutions / "endless.ipynb", "x = 1", ENDLESS, "x = 1")
    (solutions / "conftest.py").write_text(ENDS_SOON.format(seconds=cell_s + 2))
    (tmp_path / "chapters").mkdir()
    phase = phases.notebooks(Selection(exhaustive=True, alone=True))
    command = [word for word in phase.commands[0] if not word.startswith("--nbval-cell-timeout")]
    command = ("env", f"PYTHONPATH={ROOT}", *command, f"--nbval-cell-timeout={cell_s}")
    result = run_phase(Phase("notebooks", (command,), is_pytest=True, notebooks=phase.notebooks), tmp_path)

    def outcomes(notebook: str) -> list[str]:
        return [test.verdict for test in result.tests.tests.values() if notebook in test.name]

    assert outcomes("hangs.ipynb") == ["passed", "failed", "failed"]
    assert outcomes("endless.ipynb") == ["passed", "failed", "skipped"]
    hangs, _, endless = (test.reason for test in result.tests.failed)
    assert hangs.startswith("Cell 1: Timeout of ") and hangs.endswith(" · KeyboardInterrupt:")
    assert "from pytest-timeout" in endless
    assert is_gone(int((solutions / "pid").read_text()))


def test_a_phase_without_notebooks_fails(tmp_path):
    (tmp_path / "solutions").mkdir()
    result = run_phase(phases.notebooks(Selection(exhaustive=True)), tmp_path)
    assert result.problem == "there is no notebook in solutions or chapters" and result.counts == {"failed": 1}


STARTS_A_SLEEPER = """
import subprocess, sys, time
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("pid", "w").write(str(sleeper.pid))
time.sleep(600)
"""


def test_a_silent_command_is_killed_with_all_its_descendants(tmp_path, monkeypatch):
    """Like a kernel, the grandchild has its own session."""
    monkeypatch.setattr(execution, "SILENCE_S", 2)
    monkeypatch.setenv(deadlines.SCALE, "1")
    problem = run_command((sys.executable, "-c", STARTS_A_SLEEPER), tmp_path, has_reported=lambda: False)
    assert problem == "killed because it reported nothing for 2 s"
    assert is_gone(int((tmp_path / "pid").read_text()))


def test_a_command_that_reports_may_take_any_time(tmp_path, monkeypatch):
    monkeypatch.setattr(execution, "SILENCE_S", 0)
    assert (
        run_command((sys.executable, "-c", "import time; time.sleep(1)"), tmp_path, has_reported=lambda: True) is None
    )
    assert run_command((sys.executable, "-c", "import time; time.sleep(1)"), tmp_path) is None, "lint reports nothing"


def test_a_stopped_runner_leaves_nothing_behind(tmp_path):
    """A canceled CI job gets SIGTERM."""
    pid = tmp_path / "pid"
    sleep = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    source = f"""
from tests import run
from tests.runner.phases import Phase
run.BUILDERS = {{"lint": lambda _: Phase("lint", (({sys.executable!r}, "-c", {sleep!r}),))}}
run.main([])
"""
    runner = subprocess.Popen([sys.executable, "-c", source], cwd=ROOT)
    ends_s = time.monotonic() + deadlines.scaled(60)
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < ends_s
        time.sleep(0.02)
    runner.terminate()
    assert runner.wait(deadlines.scaled(30)) == 143
    assert is_gone(int(pid.read_text()))


# --- deadlines and workers --------------------------------------------------------------------------


@pytest.fixture
def no_time_scale(monkeypatch):
    """Undoes what calibrate() does to the environment."""
    monkeypatch.setenv(deadlines.SCALE, "1")


def test_deadlines_grow_with_the_time_scale(monkeypatch):
    monkeypatch.setenv(deadlines.SCALE, "2.5")
    assert deadlines.scaled(10) == 25
    command = phases.unit(Selection()).commands[0]
    assert "--timeout=750" in command and "faulthandler_timeout=1125" in command
    assert "--nbval-cell-timeout=375" in phases.notebooks(Selection()).commands[0]


@pytest.mark.parametrize("scale", ["", "0.2", None])
def test_no_deadline_is_shorter_than_on_an_idle_machine(monkeypatch, scale):
    if scale is None:
        monkeypatch.delenv(deadlines.SCALE, raising=False)
    else:
        monkeypatch.setenv(deadlines.SCALE, scale)
    assert deadlines.scaled(10) == 10


@pytest.mark.parametrize(
    ("measured", "set_before", "scale"), [(3.04, "1", 6.1), (1.0, "4", 4.0), (1.0, "1", 2.0), (7.0, "1", 8.0)]
)
def test_the_time_scale_is_measured_and_never_lowered(monkeypatch, measured, set_before, scale):
    monkeypatch.setenv(deadlines.SCALE, set_before)
    monkeypatch.setattr(calibration, "measure_time_scale", lambda: measured)
    assert calibration.calibrate() == scale == deadlines.time_scale()


def test_slow_work_raises_the_time_scale(monkeypatch):
    monkeypatch.setattr(calibration, "WORK", "import time; time.sleep(0.5)")
    monkeypatch.setattr(calibration, "IDLE_S", 0.1)
    assert calibration.measure_time_scale() >= 5
    monkeypatch.setattr(calibration, "IDLE_S", 1e-6)
    assert calibration.measure_time_scale() == calibration.MOST_SCALE
    monkeypatch.setattr(calibration, "IDLE_S", 1e6)
    assert calibration.measure_time_scale() == 1


@pytest.mark.parametrize(("deaths", "starts"), [(0, 1), (2, 3), (3, 3)])
def test_a_kernel_that_dies_while_it_starts_is_started_again(deaths, starts):
    tried = []

    def start(**options):
        tried.append(options)
        if len(tried) <= deaths:
            raise RuntimeError("Kernel died before replying to kernel_info")
        return "a manager and a client"

    with pytest.raises(RuntimeError) if deaths == plugin.MOST_KERNEL_STARTS else contextlib.nullcontext():
        assert plugin.with_retries(start)(cwd="here") == "a manager and a client"
    assert tried == [{"cwd": "here"}] * starts


def test_workers_follow_cores_and_memory(monkeypatch):
    def workers_with(cores: int, free_gb: float, **selected: bool) -> list[int]:
        monkeypatch.setattr(calibration, "cores", lambda: cores)
        memory = psutil.virtual_memory()._replace(available=int(free_gb * 1e9))
        monkeypatch.setattr(calibration.psutil, "virtual_memory", lambda: memory)
        return [builder(Selection(**selected)).workers for builder in (phases.unit, phases.notebooks)]

    assert workers_with(cores=2, free_gb=16) == [3, 3]
    assert workers_with(cores=2, free_gb=16, exhaustive=True) == [4, 3], "mutants that hang leave the cores to others"
    assert workers_with(cores=16, free_gb=64) == [17, 17]
    assert workers_with(cores=16, free_gb=8.5) == [4, 4]
    assert workers_with(cores=1, free_gb=1) == [1, 1]


# --- which tests run --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--chapter", "42"], "There is no chapter 42. The chapters are 00_ranks, 01_collectives, "),
        (["--chapter", "zero"], "There is no chapter zero. The chapters are "),
        (["untit"], "There is no phase untit. The phases are lint, unit, notebooks."),
    ],
)
def test_unknown_chapters_and_phases_get_a_one_line_message(capsys, arguments, message):
    assert run.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(message) and len(shown.err.splitlines()) == 1 and not shown.out


def test_a_chapter_is_found_by_number_and_by_name():
    (name,) = [name for name in mutation_results.chapter_names() if name.endswith("_zero3")]
    number = name.split("_")[0]
    assert {run.chosen_chapter(argument) for argument in (name, number, str(int(number)), "zero3")} == {name}
    assert run.chosen_chapter("0") == "00_ranks"


CHAPTERS = """
import pytest

@pytest.mark.parametrize("path", [pytest.param(0, id="09_zero3-mutant"), pytest.param(0, id="08_zero2-mutant")])
def test_mutant(path): pass
@pytest.mark.chapter("zero2", "zero3")
def test_marked(): pass
@pytest.mark.chapter("zero2")
def test_other(): pass
"""


def test_a_test_belongs_to_a_chapter_by_name_mark_or_file(tmp_path):
    (tmp_path / "test_zero3.py").write_text("def test_own(): pass")
    (tmp_path / "test_zero3_memory.py").write_text("def test_own_memory(): pass")
    (tmp_path / "test_zero31.py").write_text("def test_not_its_own(): pass")
    result = toy_phase(tmp_path, CHAPTERS, ".", "--chapter", "09_zero3")
    assert set(outcomes_of(result)) == {"test_mutant[09_zero3-mutant]", "test_marked", "test_own", "test_own_memory"}
    assert result.problem is None and result.tests.collected == list(result.tests.tests)


def test_all_chapter_marks_name_existing_chapters():
    titles = {name.split("_", 1)[1] for name in mutation_results.chapter_names()}
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    marks = [
        mark
        for source in sources
        for mark in re.findall(r"^(?:pytestmark = |@)pytest\.mark\.chapter\((.+)\)", source, re.M)
    ]
    assert {name for mark in marks for name in re.findall(r"\w+", mark)} <= titles


def test_a_chapter_has_its_notebooks_and_mutants():
    selection = Selection(chapter="09_zero3")
    chosen = ("--chapter", "09_zero3", "--deselect", f"{phases.MUTANTS}::test_our_own_solution_passes")
    assert phases.unit(selection).commands[0][-4:] == chosen  # the solution's notebook runs
    assert phases.unit(selection).mutants_of == ("09_zero3",)
    assert phases.notebooks(selection).notebooks == ("solutions/09_zero3_solution.ipynb", "chapters/09_zero3.ipynb")


def test_quick_skips_slow_tests_and_most_notebooks():
    assert "not gpu and not slow and not exhaustive" in phases.unit(Selection(quick=True)).commands[0]
    assert phases.unit(Selection(quick=True)).mutants_of == ()
    quick = phases.notebooks(Selection(quick=True)).notebooks
    assert len(quick) == 2 and all((ROOT / name).exists() for name in quick)


def test_ci_runs_all_solutions_and_make_test_all_lessons():
    assert phases.notebooks(Selection(exhaustive=True)).notebooks == ("solutions", "chapters")
    lessons = phases.notebooks(Selection())
    assert lessons.notebooks[0] == "chapters" and all((ROOT / name).exists() for name in lessons.notebooks)


def test_ci_requires_all_mutants():
    assert "not gpu" in phases.unit(Selection(exhaustive=True)).commands[0]
    assert phases.unit(Selection(exhaustive=True)).mutants_of == tuple(mutation_results.chapter_names())
    assert (ROOT / ".ci" / "run").read_text().endswith("\nmake test ALL=1\n")


def test_pyright_reads_only_a_chapter_that_was_chosen():
    whole, chapter = (phases.lint(Selection(chapter=name)).commands for name in ("", "08_zero2"))
    assert chapter[:-1] == whole[:-1] and whole[-1][-2:] == ("--project", "pyproject.toml")
    assert chapter[-1][-2:] == ("shared/checks/zero2", "solutions/zero2.py")


def test_exhaustive_tests_run_in_ci_in_their_chapter_and_after_a_failure():
    assert "not gpu and not exhaustive" in phases.unit(Selection()).commands[0]
    assert phases.unit(Selection()).mutants_of == ()
    failed = {"unit": [f"{phases.MUTANTS}::test_the_named_check_catches_the_mutant[09_zero3-no_hooks]"]}
    for selection in (Selection(chapter="09_zero3"), Selection(failed=failed)):
        assert "not gpu" in phases.unit(selection).commands[0]


def test_a_mutant_of_every_exercise_is_tried_by_default():
    tried = {exercise for exercise, marks in mutants_by_exercise() if not marks}
    assert tried == {exercise for exercise, _ in mutants_by_exercise()}


def mutants_by_exercise() -> list[tuple[tuple[str, str], list]]:
    """Return the chapter and the exercise of every mutant, and its marks."""
    return [
        ((test.values[1].chapter, test.values[1].exercise), list(test.marks)) for test in test_mutants.all_mutants()
    ]


def test_only_the_tests_that_failed_run_again(tmp_path):
    failed = "test_it.py::test_fails", "test_it.py::test_is_gone"
    result = toy_phase(tmp_path, OUTCOMES, only=failed)
    assert outcomes_of(result) == {"test_fails": "failed"} and result.tests.collected == ["test_it.py::test_fails"]


def test_last_failed_runs_only_the_files_of_failed_tests():
    failed = {"unit": ["tests/house/test_run.py::test_x[a b]", "tests/gone.py::test_y"], "notebooks": []}
    unit = phases.unit(Selection(failed=failed))
    assert "tests/house/test_run.py" in unit.commands[0] and "tests" not in unit.commands[0]
    assert unit.only == tuple(failed["unit"]) and unit.mutants_of == ()
    assert phases.notebooks(Selection(failed=failed)).notebooks == phases.NOTEBOOK_FOLDERS, "the whole phase had failed"
    failed["notebooks"] = ["solutions/00_ranks_solution.ipynb::Cell 3"]
    assert phases.notebooks(Selection(failed=failed)).notebooks == ("solutions/00_ranks_solution.ipynb",)


# --- the record of the last run ---------------------------------------------------------------------


def results_of(**outcomes: str) -> Results:
    tests = {name: Outcome(name, outcome, 1.5) for name, outcome in outcomes.items()}
    return Results(collected=list(tests), tests=tests)


def test_a_record_is_saved_and_loaded(tmp_path):
    path = tmp_path / "folder" / "last_run.json"
    record = Record()
    record.note("unit", results_of(a="passed", b="failed"), failed=True, whole=True)
    record.note("lint", Results(), failed=True, whole=True)
    record.save(path)
    assert Record.load(path) == Record({"unit": ["b"], "lint": []}, {"a": 1.5, "b": 1.5})


@pytest.mark.parametrize("text", [None, "", "{", '{"other": 1}'])
def test_an_unreadable_record_counts_as_empty(tmp_path, text):
    path = tmp_path / "last_run.json"
    if text is not None:
        path.write_text(text)
    assert Record.load(path) == Record()


def test_failures_are_kept_until_the_test_passes_or_all_tests_run():
    record = Record({"unit": ["a", "b"]})
    record.note("unit", results_of(c="failed"), failed=True, whole=False)
    assert record.failed == {"unit": ["a", "b", "c"]}
    record.note("unit", results_of(a="passed", c="failed"), failed=True, whole=False)
    assert record.failed == {"unit": ["b", "c"]}
    record.note("unit", results_of(a="passed"), failed=False, whole=True)
    assert record.failed == {}


@pytest.fixture
def toy_run(tmp_path, monkeypatch, no_time_scale):
    """Run main() with toy phases and a record of its own. Returns the exit code and the phases that ran."""
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(calibration, "measure_time_scale", lambda: 1.0)

    def toy_run(*arguments: str, broken=(), shaky=(), failures: int = 1) -> tuple[int, list[str]]:
        ran = []

        def fake_phase(phase, root, usual_s):
            fails = phase.name in broken or (phase.name in shaky and phase.name not in ran)
            ran.append(phase.name)
            test = "a.ipynb::Cell " if phase.name == "notebooks" else f"{phase.name}_test"
            outcomes = {f"{test}{n}": "failed" if fails else "passed" for n in range(failures)}
            problem = f"{failures} of {failures} tests failed" if fails else None
            return Result(phase.name, 0, problem, results_of(**outcomes))

        monkeypatch.setattr(run, "run_phase", fake_phase)
        return run.main(list(arguments)), ran

    return toy_run


@pytest.mark.parametrize(("broken", "code"), [((), 0), (("lint",), 1), (("notebooks",), 1)])
def test_all_phases_run_and_must_pass(toy_run, capsys, broken, code):
    assert toy_run(broken=broken) == (code, ["lint", "unit", "notebooks", *broken])
    expected = "2 passed, 1 failed" if broken else "3 passed, 0 failed"
    assert capsys.readouterr().out.splitlines()[-1] == expected


def test_a_test_that_fails_only_once_is_named_and_costs_nothing(toy_run, capsys):
    assert toy_run(shaky=("unit",)) == (0, ["lint", "unit", "notebooks", "unit"])
    shown = capsys.readouterr().out
    assert "again, alone. Find out why:\n    unit_test0" in shown and shown.endswith("3 passed, 0 failed\n")
    assert toy_run("--last-failed") == (0, [])
    assert toy_run("unit", shaky=("unit",), failures=4) == (1, ["unit"]), "four failures are no accident"
    assert toy_run("--last-failed", broken=("unit",)) == (1, ["unit"]), "a second time is enough"
    assert toy_run("notebooks", shaky=("notebooks",), failures=4) == (0, ["notebooks"] * 2), "cells of one notebook"


def test_a_failed_test_runs_again_with_one_worker():
    test = "tests/shared/wire/test_wire.py::test_it"
    again = phases.unit(Selection(exhaustive=True, failed={"unit": [test]}, alone=True))
    assert again.workers == 1 and again.only == (test,)
    assert again.mutants_of == (), "one test says nothing about the other mutants"


def test_chosen_phases_run_in_their_fixed_order(toy_run):
    assert toy_run("unit", "lint") == (0, ["lint", "unit"])


def test_last_failed_runs_the_phases_that_failed(toy_run, capsys):
    toy_run(broken=("lint", "notebooks"))
    assert toy_run("--last-failed", broken=("lint",)) == (1, ["lint", "notebooks"])
    assert toy_run("--last-failed") == (0, ["lint"])
    capsys.readouterr()
    assert toy_run("--last-failed") == (0, [])
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == "Nothing failed the last time." and shown[-1] == "0 passed, 0 failed"


def test_a_busy_machine_is_mentioned(toy_run, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "measure_time_scale", lambda: 3.2)
    toy_run("lint")
    assert "every deadline is 6.4 times as long as usual" in capsys.readouterr().out


# --- progress ---------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def results_from(*events: dict) -> Results:
    results = Results()
    for event in events:
        results.take(json.dumps(event))
    return results


def report(name: str, outcome: str = "passed", seconds: float = 1.0) -> dict:
    return {"report": name, "outcome": outcome, "seconds": seconds, "reason": "because", "properties": {}}


A, B, C = "tests/test_a.py::test_one", "tests/test_b.py::test_two[09_zero3-three]", "solutions/c.ipynb::Cell 4"


def test_the_line_shows_running_tests_and_the_time_left():
    results = results_from(
        {"collected": [A, B, C]}, {"started": A}, report(A, "failed"), {"finished": A}, {"started": B}
    )
    line = progress.Progress("unit", results, {}, workers=1, stream=io.StringIO())
    assert line.line(results.running[B] + 7) == (
        "unit: 1 of 3 tests done, 1 failed, about 2 s left · running: test_b.py 09_zero3-three (7 s)"
    )


def test_the_line_before_the_first_test():
    shown = progress.Progress("unit", Results(), {}, workers=2, stream=io.StringIO())
    assert shown.line(time.monotonic()) == "unit: collecting tests"


def test_the_estimate_uses_the_last_run_and_the_speed_of_this_one():
    results = results_from({"collected": [A, B, C]})
    shown = progress.Progress("unit", results, {A: 100.0, B: 200.0, C: 300.0}, workers=2, stream=io.StringIO())
    began_s = shown._began_s
    assert shown.seconds_left(began_s) == pytest.approx(300), "600 s for two workers"
    for event in (report(A, seconds=400.0), {"finished": A}):
        results.take(json.dumps(event))
    assert shown.seconds_left(began_s + 400) > 1000, "this run is four times as slow as the last one"


def test_a_test_without_a_known_duration_counts_as_average():
    shown = progress.Progress("unit", results_from({"collected": [A, B, C]}), {A: 10.0, B: 30.0}, workers=1)
    assert shown.seconds_left(shown._began_s) == pytest.approx(60)


def test_a_log_gets_a_line_from_time_to_time(monkeypatch):
    stream = io.StringIO()
    shown = progress.Progress("unit", results_from({"collected": [A]}), {A: 5.0}, workers=1, stream=stream)
    shown.show()
    assert stream.getvalue() == ""
    monkeypatch.setattr(progress, "EVERY_S", 0)
    shown.show()
    assert stream.getvalue() == "unit: 0 of 1 tests done, about 5 s left\n"


def test_a_terminal_has_one_line_and_each_failure_stays_above_it(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    results = results_from({"collected": [A, B]}, report(A, "failed"))
    shown = progress.Progress("unit", results, {}, workers=1, stream=stream)
    shown.show()
    shown.show()
    lines = stream.getvalue().split("\r\x1b[K")
    assert lines[1:] == [f"FAILED {A} · because\n", *2 * ["unit: 1 of 2 tests done, 1 fa"]]
    shown.close()
    assert stream.getvalue().endswith("\r\x1b[K")


# --- the summary ------------------------------------------------------------------------------------


def test_the_summary_has_the_slowest_tests_all_failures_and_the_total():
    unit = results_from({"collected": [A, B]}, report(A, seconds=2.0), report(B, "failed", seconds=70.0))
    notebooks = results_from({"collected": [C]}, report(C, "skipped"))
    results = [
        Result("lint", 0.5, None, is_pytest=False),
        Result("unit", 61.24, "1 of 2 tests failed", unit),
        Result("notebooks", 9.0, "exit code 3", notebooks),
    ]
    lines = summary(results).splitlines()
    assert lines[1].split() == ["lint", "0.5", "passed"]
    assert lines[2].split() == ["unit", "61.2", "failed:", "1", "of", "2", "tests", "failed"]
    slowest = lines.index("Slowest tests:")
    assert lines[slowest + 1].split() == ["70.0", "s", B]
    skipped = lines.index("Skipped:")
    assert lines[skipped + 1].split() == ["1", "because"]
    failures = lines.index("Failures:")
    assert lines[failures + 1 : failures + 5] == [
        "unit: 1 of 2 tests failed",
        f"    {B}",
        "        because",
        "notebooks: exit code 3",
    ]
    assert lines[-1] == "1 passed, 2 failed, 1 skipped"


def test_the_total_mentions_skipped_tests_only_if_there_are_any():
    assert summary([Result("unit", 1, None, results_of(a="passed"))]).splitlines()[-1] == "1 passed, 0 failed"
    lint = Result("lint", 1, "exit code 1", is_pytest=False)
    assert lint.counts == Counter() and summary([lint]).splitlines()[-1] == "0 passed, 0 failed"


MUTANT = """
import pytest

@pytest.mark.parametrize("path", [pytest.param(0, id="02_manual_ddp-summed")])
def test_the_named_check_catches_the_mutant(path, record_property):
    record_property("caught_by", "average_gradients · values")

@pytest.mark.parametrize("path", [pytest.param(0, id="02_manual_ddp-way")])
def test_a_right_solution_written_differently_passes(path): {}
"""


def mutants_phase(tmp_path: Path, body: str) -> Result:
    return toy_phase(tmp_path, MUTANT.format(body), mutants_of=("02_manual_ddp",))


def test_the_summary_shows_how_many_mutants_were_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(mutation_results, "problems", lambda found, chapters: [])
    result = mutants_phase(tmp_path, "pass")
    lines = summary([result]).splitlines()
    assert result.problem is None and lines[-1] == "2 passed, 0 failed"
    index = next(index for index, line in enumerate(lines) if line.startswith("chapter"))
    assert lines[index + 1].split() == ["02_manual_ddp", "1", "/", "1", "1", "/", "1", "0"]


def test_a_mutant_that_was_not_tried_fails_the_phase(tmp_path):
    """The results contain only one of many files."""
    result = mutants_phase(tmp_path, "pass")
    assert result.problem.startswith("mutants and variants: was not tried: mutants/02_manual_ddp/")
    assert " more" in result.problem and result.counts["failed"] == 1


def test_a_variant_that_fails_is_counted(tmp_path):
    result = mutants_phase(tmp_path, "assert 0")
    assert result.problem == "1 of 2 tests failed"
    assert "0 / 1" in summary([result])
