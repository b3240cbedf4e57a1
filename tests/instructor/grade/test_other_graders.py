"""The course's files work with other graders: Gradescope's containers, and nbgrader's own commands.

The autograder for Gradescope is tried in a folder that is laid out as its containers are.
"""

import contextlib
import csv
import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import psutil
import pytest

from instructor import contents
from instructor.grade import gradescope, nbgrader_course
from instructor.grade.records import Record
from instructor.links import TAG
from instructor.release import as_zip
from shared.deadlines import scaled
from tests.handed_in import CHAPTERS, cell_of, hand_in, left_over, need_sandbox, writes

pytestmark = pytest.mark.exhaustive

LAB = "00_ranks"
ROOT = Path(__file__).parents[3]


def test_the_zip_has_both_scripts_at_its_top_and_no_tests():
    files = gradescope.autograder(0)
    assert files["run_autograder"].startswith(b"#!/usr/bin/env bash") and files["setup.sh"].startswith(b"#!")
    assert not any(name.startswith(("course/tests", "course/build")) for name in files)
    assert {"course/source/00_ranks/lab.py", "course/shared/ranks/__init__.py"} <= set(files)


def test_whoever_writes_an_autograder_learns_which_container_it_needs(tmp_path, monkeypatch, capsys):
    """Gradescope kills a container that needs more than its default of 768 MB, and the student gets no points."""
    monkeypatch.setattr(sys, "argv", ["gradescope", "00", "--folder", str(tmp_path)])
    assert gradescope.main() == 0
    assert "choose at least 2 CPUs and 3 GB of memory" in capsys.readouterr().out


@pytest.mark.parametrize(("limit_bytes", "graded"), [(768 << 20, False), (3 << 30, True), (None, True)])
def test_a_container_with_too_little_memory_says_so(tmp_path, monkeypatch, limit_bytes, graded):
    """Gradescope's default is 768 MB. The system once killed the grader there, without a word."""
    judged = []

    def judge(submission, judged_with, limits):
        judged.append(limits.memory_bytes)
        return Record(submission.student, submission.lab, "", [])

    monkeypatch.setattr(gradescope.sandbox, "require", lambda: None)
    monkeypatch.setattr(gradescope.cgroup, "limit_bytes", lambda: limit_bytes)
    monkeypatch.setattr(gradescope.grading, "grade", judge)
    hand_in(tmp_path / "in", "anna", LAB)
    gradescope.run(tmp_path / "in" / "anna" / LAB, tmp_path / "results", CHAPTERS[LAB])
    results = json.loads((tmp_path / "results" / "results.json").read_text())
    assert bool(judged) == graded
    assert judged == [] or judged[0] <= (limit_bytes or 1e12) - (gradescope.OWN_BYTES if limit_bytes else 0)
    said = "this container may use 0.81 GB of memory" in results["output"] and "choose at least" in results["output"]
    assert said == (not graded)


def test_a_machine_that_fails_is_named_as_the_cause_and_gives_no_points(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise gradescope.grading.NotGraded("the judge did not start: no room")

    monkeypatch.setattr(gradescope.sandbox, "require", lambda: None)
    monkeypatch.setattr(gradescope.grading, "grade", fail)
    hand_in(tmp_path / "in", "anna", LAB)
    folders = tmp_path / "in" / "anna" / LAB, tmp_path / "results"
    monkeypatch.setattr(sys, "argv", ["gradescope", "00", "--run", *map(str, folders)])
    assert gradescope.main() == 1
    printed = capsys.readouterr().out
    assert "run the autograder again" in printed and "the judge did not start: no room" in printed
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(("hidden", "open_to_all"), [("prefix", "base_prefix"), ("base_prefix", "prefix")])
def test_a_python_that_the_judge_cannot_reach_is_named(tmp_path, monkeypatch, hidden, open_to_all):
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    monkeypatch.setattr(gradescope.sandbox, "in_container", lambda: True)
    monkeypatch.setattr(sys, hidden, str(private / "python"))
    monkeypatch.setattr(sys, open_to_all, "/usr")
    with pytest.raises(gradescope.sandbox.NoSandbox, match="it cannot open "):
        gradescope.sandbox.require()


@pytest.mark.parametrize(("has", "uses"), [("3.10", "python3.12"), ("3.11", "python3")])
def test_the_setup_finds_a_python_that_is_new_enough(tmp_path, has, uses):
    """Gradescope's usual image has Python 3.10, which is too old for the course. All commands are stand-ins."""
    log, commands = tmp_path / "log", tmp_path / "bin"
    commands.mkdir()
    (tmp_path / "source" / "course").mkdir(parents=True)
    old_enough = f"if [ $1 = -c ]; then exit {int(has == '3.10')}; fi"
    venv = 'mkdir -p "$3/bin"; printf "#!/bin/sh\\necho pip \\$* >> $LOG" > "$3/bin/pip"; chmod +x "$3/bin/pip"'
    for name, body in {
        "apt-get": "",
        "add-apt-repository": "",
        "python3": f"{old_enough}; {venv}",
        "python3.12": venv,
    }.items():
        (commands / name).write_text(f'#!/bin/sh\necho {name} "$@" >> "$LOG"\n{body}\n')
        (commands / name).chmod(0o755)
    setup = tmp_path / "setup.sh"
    setup.write_bytes(gradescope.autograder(0)["setup.sh"])
    environment = {"PATH": f"{commands}:/usr/bin:/bin", "LOG": str(log), "AUTOGRADER": str(tmp_path)}
    environment["COURSE_VENV"] = str(tmp_path / "venv")
    subprocess.run(["bash", str(setup)], env=environment, check=True, timeout=scaled(60))
    ran = log.read_text().splitlines()
    assert f"{uses} -m venv {tmp_path / 'venv'}" in ran
    assert ("add-apt-repository -y ppa:deadsnakes/ppa" in ran) == (has == "3.10")
    assert ran[-1] == "pip install --quiet -c constraints.txt .[dev]"


def container() -> list[str]:
    """Return the start of a command that runs as root, in a file system where other users can read this Python."""
    need_sandbox()
    pythons = sorted({Path(prefix).resolve() for prefix in (sys.base_prefix, sys.prefix)})
    parents = sorted({parent for python in pythons for parent in python.parents})
    hidden = [path for path in parents if not path.stat().st_mode & stat.S_IXOTH]
    options = ["--bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for path in parents:  # A folder that only root may enter is replaced by one with this Python.
        if any(path.is_relative_to(folder) for folder in hidden):
            options += ["--perms", "0755", "--tmpfs" if path in hidden else "--dir", str(path)]
    for python in pythons:
        options += ["--ro-bind", str(python), str(python)]
    return ["bwrap", "--cap-add", "ALL", *options, "--"]


@pytest.mark.skipif(os.getuid() != 0, reason="Gradescope runs an autograder as root")
def test_a_container_grades_a_submission_and_hides_the_solutions(tmp_path):
    (tmp_path.parent).chmod(0o755)
    tmp_path.chmod(0o755)
    top = tmp_path / "autograder"
    (top / "source").mkdir(parents=True)
    (top / "results").mkdir()
    packed = tmp_path / "autograder.zip"
    packed.write_bytes(as_zip(gradescope.autograder(0), executable=("run_autograder",)))
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(top / "source")
    solution = top / "source" / "course" / "solutions" / "first_collectives.py"
    wrong = "%%ranks\ndef sum_over_ranks(number):\n    return number"
    reads = f"%%ranks\ndef global_mean(values):\n    return open({str(solution)!r}).read()"
    own = hand_in(tmp_path / "in", "anna", LAB, writes(sum_over_ranks=wrong, global_mean=reads))
    (top / "submission").mkdir()
    (top / "submission" / f"{LAB}_lab.ipynb").write_bytes(own.path.read_bytes())
    environment = os.environ | {"AUTOGRADER": str(top), "COURSE_PYTHON": sys.executable}
    environment.pop("PYTHONPATH", None)
    script = top / "source" / "run_autograder"
    done = subprocess.run(
        [*container(), "bash", str(script)], env=environment, capture_output=True, text=True, timeout=scaled(600)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    results = json.loads((top / "results" / "results.json").read_text())
    assert results["score"] == 10.0, results
    first, second, *_ = (test["output"] for test in results["tests"])
    assert "PermissionError" in second and "PermissionError" not in first and "def global_mean" not in second
    assert not left_over_here()


def left_over_here() -> list[psutil.Process]:
    """Return the judge's processes that are still alive. Those of other tests' sandboxes have their own process ids."""
    own = os.readlink("/proc/self/ns/pid")
    found = []
    for process in left_over():
        with contextlib.suppress(OSError):
            found += [process] * (os.readlink(f"/proc/{process.pid}/ns/pid") == own)
    return found


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A course in which anna handed in our solution, but left the first two exercises as they were released."""
    folder = tmp_path_factory.mktemp("nbgrader")
    nbgrader_course.write(folder)
    nbgrader(folder, "generate_assignment", LAB, "--create")
    released = nbformat.read(folder / "release" / LAB / f"{LAB}.ipynb", as_version=4)
    blank = {name: cell_of(released, name.replace("_", "-")).source for name in ("sum_over_ranks", "global_mean")}
    hand_in(folder / "submitted", "anna", LAB, writes(**blank))
    return folder


def nbgrader(folder: Path, *arguments: str) -> None:
    bin_folder = str(Path(sys.prefix) / "bin")  # nbgrader starts alembic by name
    environment = {**os.environ, "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "nbgrader", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nbgrader_releases_the_same_lab_as_the_course(course):
    released = nbformat.read(course / "release" / LAB / f"{LAB}.ipynb", as_version=4)
    ours = nbformat.read(ROOT / contents.notebook("labs", LAB), as_version=4)
    own = [cell for cell in ours.cells if TAG not in cell.metadata.get("tags", [])]  # without links
    assert [cell.source for cell in released.cells] == [cell.source for cell in own]


def test_nbgrader_gives_all_points_to_right_exercises_and_none_to_blank_ones(course):
    nbgrader(course, "autograde", LAB)
    nbgrader(course, "export")
    (anna,) = csv.DictReader((course / "grades.csv").open())
    assert (anna["student_id"], anna["score"], anna["max_score"]) == ("anna", "10.0", "15.0")


def test_an_existing_configuration_is_not_overwritten(tmp_path):
    (tmp_path / "nbgrader_config.py").write_text("# mine")
    assert len(nbgrader_course.write(tmp_path)) == len(CHAPTERS)
    assert (tmp_path / "nbgrader_config.py").read_text() == "# mine"
