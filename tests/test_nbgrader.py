"""nbgrader's own commands (generate_assignment, autograde, export) work on the course's files."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from instructor import contents
from instructor.grade import nbgrader_course
from instructor.links import TAG
from tests.handed_in import CHAPTERS, hand_in

pytestmark = pytest.mark.exhaustive

LAB = "00_ranks"
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A course in which anna handed in our solution, and ben handed in the lab as it was released."""
    folder = tmp_path_factory.mktemp("nbgrader")
    nbgrader_course.write(folder)
    nbgrader(folder, "generate_assignment", LAB, "--create")
    hand_in(folder / "submitted", "anna", LAB)
    ben = folder / "submitted" / "ben" / LAB / f"{LAB}.ipynb"
    ben.parent.mkdir(parents=True)
    ben.write_bytes((folder / "release" / LAB / f"{LAB}.ipynb").read_bytes())
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


def test_nbgrader_gives_all_points_to_a_solution_and_none_to_a_blank_lab(course):
    nbgrader(course, "autograde", LAB)
    nbgrader(course, "export")
    grades = {row["student_id"]: row for row in csv.DictReader((course / "grades.csv").open())}
    assert {student: (row["score"], row["max_score"]) for student, row in grades.items()} == {
        "anna": ("15.0", "15.0"),
        "ben": ("0.0", "15.0"),
    }


def test_an_existing_configuration_is_not_overwritten(tmp_path):
    (tmp_path / "nbgrader_config.py").write_text("# mine")
    assert len(nbgrader_course.write(tmp_path)) == len(CHAPTERS)
    assert (tmp_path / "nbgrader_config.py").read_text() == "# mine"
