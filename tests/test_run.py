"""The runner of the checks reports every way in which a phase can fail."""

import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest

from tests import mutation_results, run


def pytest_phase(tmp_path: Path, source: str, deadline_s: float = 60) -> run.Result:
    """Run a phase of one pytest file, without the plugins that would take two seconds to load."""
    (tmp_path / "test_it.py").write_text(source)
    command = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", *run.PYTEST, "-q", "-p", "no:cacheprovider", "test_it.py")
    return run.run_phase(run.Phase("unit", (command,), deadline_s, is_pytest=True), tmp_path)


def python_phase(source: str, deadline_s: float = 60) -> run.Phase:
    return run.Phase("lint", ((sys.executable, "-c", source),), deadline_s)


def test_outcomes_are_counted_from_the_report(tmp_path):
    source = """
import pytest

def test_passes(): pass
def test_fails(): assert 0
@pytest.mark.skip
def test_skipped(): pass
@pytest.fixture
def broken(): raise OSError
def test_error(broken): pass
"""
    result = pytest_phase(tmp_path, source)
    assert str(result.tally) == "1 passed, 2 failed, 1 skipped"
    assert result.problem == "2 of 3 tests failed"


def test_the_summary_says_where_the_time_went(tmp_path):
    source = "import time\ndef test_slow(): time.sleep(0.3)\ndef test_fast(): pass"
    result = pytest_phase(tmp_path, source)
    (seconds,) = result.tally.seconds_in.values()
    assert 0.3 <= seconds < 60
    lines = run.summary([result]).splitlines()
    assert lines[2].endswith("test_it") and lines[-1] == "2 passed, 0 failed"


def test_a_phase_that_passes(tmp_path):
    result = pytest_phase(tmp_path, "def test_passes(): pass")
    assert (result.problem, str(result.tally)) == (None, "1 passed, 0 failed")


@pytest.mark.parametrize("source", ["", "import pytest\n@pytest.mark.skip\ndef test_skipped(): pass"])
def test_a_phase_without_a_test_that_ran_fails(tmp_path, source):
    result = pytest_phase(tmp_path, source)
    assert result.problem is not None and result.tally.failed == 1


def test_a_phase_whose_tests_pass_but_whose_pytest_fails_is_failed():
    tally = run.Tally(passed=3)
    assert run.judge(tally, "exit code 3") == "exit code 3"


def test_a_report_cut_short_counts_nothing(tmp_path):
    (tmp_path / "report.xml").write_text("<testsuites><testsuite><testcase name='a'/>")
    assert run.read_report(tmp_path / "report.xml") == run.Tally()


def test_every_command_of_a_phase_runs_and_any_can_fail_it(tmp_path):
    fail, note = (sys.executable, "-c", "exit(3)"), (sys.executable, "-c", "open('ran', 'w')")
    result = run.run_phase(run.Phase("lint", (fail, note), deadline_s=60), tmp_path)
    assert result.problem == "exit code 3" and (tmp_path / "ran").exists()


def test_a_phase_past_its_deadline_is_killed_with_all_it_started(tmp_path):
    """As a kernel does, the grandchild lives in a session of its own."""
    source = """
import subprocess, sys, time
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
open("pid", "w").write(str(sleeper.pid))
time.sleep(60)
"""
    started = time.monotonic()
    result = run.run_phase(python_phase(source, deadline_s=1), tmp_path)
    assert result.problem == "killed after 1 s" and time.monotonic() - started < 10
    assert is_gone(int((tmp_path / "pid").read_text()))


def is_gone(pid: int) -> bool:
    """Tell whether a process has ended, whoever has yet to collect it."""
    try:
        psutil.Process(pid).wait(5)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_a_killed_pytest_phase_counts_as_a_failure(tmp_path):
    result = pytest_phase(tmp_path, "import time\ndef test_hangs(): time.sleep(60)", deadline_s=1)
    assert (result.problem, result.tally.failed) == ("killed after 1 s", 1)


def test_a_stopped_runner_leaves_nothing_behind(tmp_path):
    """SIGTERM is what a cancelled CI job gets."""
    pid = tmp_path / "pid"
    sleep = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    source = f"""
from tests import mutation_results, run
run.PHASES = (run.Phase("lint", (({sys.executable!r}, "-c", {sleep!r}),), deadline_s=60),)
run.main([])
"""
    runner = subprocess.Popen([sys.executable, "-c", source], cwd=run.ROOT)
    deadline = time.monotonic() + 20
    while not (pid.exists() and pid.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    runner.terminate()
    assert runner.wait(10) == 143
    assert is_gone(int(pid.read_text()))


def test_children_find_the_programs_of_this_environment(tmp_path):
    source = f"import os; exit(os.environ['PATH'].split(os.pathsep)[0] != {str(Path(sys.prefix) / 'bin')!r})"
    assert run.run_phase(python_phase(source), tmp_path).problem is None


def phase_named(name: str) -> run.Phase:
    (phase,) = run.chosen_phases([name])
    return phase


def test_no_notebooks_is_a_failure(tmp_path):
    (tmp_path / "solutions").mkdir()
    result = run.run_phase(phase_named("notebooks"), tmp_path)
    assert result.problem == "no .ipynb in solutions or chapters" and result.tally.failed == 1


def test_a_cell_that_hangs_fails_and_so_does_one_that_passes_after_it(tmp_path):
    for folder in ("solutions", "chapters"):
        (tmp_path / folder).mkdir()
    cells = [nbformat.v4.new_code_cell(source) for source in ("import time", "time.sleep(600)", "x = 1")]
    for cell in cells:
        cell["execution_count"] = 1
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    nbformat.write(notebook, tmp_path / "solutions" / "hangs.ipynb")
    phase = phase_named("notebooks")
    command = [part.replace("timeout=120", "timeout=1") for part in phase.commands[0]]
    result = run.run_phase(run.Phase(phase.name, (tuple(command),), 60, True, phase.notebooks_in), tmp_path)
    assert str(result.tally) == "1 passed, 2 failed"


def test_the_summary_ends_in_the_sum():
    results = [
        run.Result("lint", 0.5, None, run.Tally()),
        run.Result("unit", 61.24, "1 of 3 tests failed", run.Tally(2, 1)),
        run.Result("notebooks", 9.0, None, run.Tally(4, 0, 1)),
    ]
    lines = run.summary(results).splitlines()
    assert lines[1].split() == ["lint", "0.5", "passed"]
    assert lines[2].split() == ["unit", "61.2", "failed:", "1", "of", "3", "tests", "failed"]
    assert lines[-1] == "6 passed, 1 failed, 1 skipped"
    assert run.summary(results[:2]).splitlines()[-1] == "2 passed, 1 failed"


MUTANT = """
import pytest

@pytest.mark.parametrize("path", [pytest.param(0, id="02_manual_ddp-summed")])
def test_the_named_check_catches_the_mutant(path, record_property):
    record_property("caught_by", "average_gradients · values")

@pytest.mark.parametrize("path", [pytest.param(0, id="02_manual_ddp-way")])
def test_a_right_solution_written_differently_passes(path): {}
"""


def mutants_phase(tmp_path: Path, then: str) -> run.Result:
    (tmp_path / "test_it.py").write_text(MUTANT.format(then))
    command = ("env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", *run.PYTEST, "-q", "-p", "no:cacheprovider", "test_it.py")
    return run.run_phase(run.Phase("unit", (command,), 60, is_pytest=True, tries_mutants=True), tmp_path)


def test_the_summary_says_how_many_mutants_were_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(mutation_results, "problems", lambda found: [])
    result = mutants_phase(tmp_path, "pass")
    lines = run.summary([result]).splitlines()
    assert result.problem is None and lines[-1] == "2 passed, 0 failed"
    place = next(place for place, line in enumerate(lines) if line.startswith("chapter"))
    assert lines[place + 1].split() == ["02_manual_ddp", "1", "/", "1", "1", "/", "1", "0"]


def test_a_mutant_that_was_not_tried_fails_the_phase_that_passed(tmp_path):
    """The report knows one of the hundreds of files that there are."""
    result = mutants_phase(tmp_path, "pass")
    assert result.problem.startswith("wrong and right solutions: was not tried: mutants/") and " more" in result.problem
    assert result.tally.failed == 1


def test_a_right_solution_that_fails_is_counted(tmp_path):
    result = mutants_phase(tmp_path, "assert 0")
    assert result.problem == "1 of 2 tests failed"
    assert "0 / 1" in run.summary([result])


def test_the_unit_phase_tries_mutants():
    assert [phase.name for phase in run.PHASES if phase.tries_mutants] == ["unit"]


@pytest.mark.parametrize(("broken", "code"), [(None, 0), ("lint", 1), ("notebooks", 1)])
def test_all_phases_run_and_any_can_fail_the_whole(monkeypatch, capsys, broken, code):
    ran = []

    def fake_phase(phase):
        ran.append(phase.name)
        return run.Result(phase.name, 0, "broken" if phase.name == broken else None, run.Tally(passed=1))

    monkeypatch.setattr(run.signal, "signal", lambda *_: None)
    monkeypatch.setattr(run, "run_phase", fake_phase)
    assert run.main([]) == code
    assert ran == ["lint", "unit", "notebooks"]
    assert capsys.readouterr().out.splitlines()[-1] == "3 passed, 0 failed"


def test_phases_can_be_chosen(capsys):
    assert [phase.name for phase in run.chosen_phases(["unit", "lint"])] == ["lint", "unit"]
    with pytest.raises(SystemExit):
        run.main(["untit"])
    assert "no phase untit" in capsys.readouterr().err
