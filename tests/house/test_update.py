"""`make update` takes a newer version of the course, keeps what a student has written, and never stops half way."""

import copy
import json
import subprocess
from pathlib import Path

import pytest

import update
from instructor import build

LAB = "labs/00_ranks_lab.ipynb"


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def write(folder: Path, lab: dict) -> None:
    (folder / LAB).parent.mkdir(exist_ok=True)
    (folder / LAB).write_text(json.dumps(lab))


def read(folder: Path) -> dict:
    return json.loads((folder / LAB).read_bytes())


def source_of(lab: dict, cell_id: str) -> str:
    return next("".join(cell["source"]) for cell in lab["cells"] if cell["id"] == cell_id)


@pytest.fixture
def course(tmp_path) -> Path:
    """The course's repository, with the real lab 00 in its first commit."""
    folder = tmp_path / "course"
    folder.mkdir()
    git(folder, "init", "-b", "main")
    write(folder, json.loads((build.ROOT / LAB).read_bytes()))
    (folder / "README.md").write_text("first\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "first")
    return folder


@pytest.fixture
def student(course, tmp_path) -> Path:
    folder = tmp_path / "student"
    git(tmp_path, "clone", str(course), str(folder))
    return folder


def second_version(course: Path) -> None:
    """Add a cell at the beginning, which shifts all ids, reword an exercise, and add a file."""
    lab = read(course)
    shifted, ids = copy.deepcopy(lab), {}
    new_cell = {"cell_type": "markdown", "id": "lab-000", "metadata": {}, "source": ["New in this version."]}
    for cell in shifted["cells"]:
        if cell["id"].startswith("lab-"):
            ids[cell["id"]] = f"lab-{int(cell['id'][4:]) + 1:03}"
            cell["id"] = ids[cell["id"]]
    shifted["cells"].insert(1, new_cell)
    originals = shifted["metadata"]["course"]["originals"]
    renamed = {ids[cell_id]: source.replace("Add up", "Sum up") for cell_id, source in originals.items()}
    shifted["metadata"]["course"]["originals"] = renamed
    write(course, shifted)
    (course / "README.md").write_text("second\n")
    (course / "notes.txt").write_text("the course's\n")
    git(course, "add", "-A")
    git(course, "commit", "-m", "second")


def test_written_exercises_and_own_cells_are_in_the_new_version(course, student):
    lab = read(student)
    cells = {cell["id"]: cell for cell in lab["cells"]}
    written = cells["lab-004"]["source"] = ["%%ranks\n", "def helper(): ...\n", "def sum_over_ranks(value): return 1.0"]
    assert "def sum_over_ranks" in lab["metadata"]["course"]["originals"]["lab-004"]
    run = {"output_type": "stream", "name": "stdout", "text": ["42"]}
    own = {"cell_type": "code", "id": "mine", "metadata": {}, "source": ["print(42)"]}
    own |= {"outputs": [run], "execution_count": 7}
    lab["cells"].insert(lab["cells"].index(cells["lab-004"]) + 1, own)
    write(student, lab)
    (student / "README.md").write_text("my notes\n")
    (student / "notes.txt").write_text("mine\n")
    second_version(course)
    done = update.update(student)
    new = read(student)
    assert source_of(new, "lab-005") == "".join(written)
    following = new["cells"][[cell["id"] for cell in new["cells"]].index("lab-005") + 1]
    assert (following["source"], following["outputs"]) == (["print(42)"], [])
    assert source_of(new, "lab-000") == "New in this version."
    assert (student / "README.md").read_text() == "second\n" and (student / "notes.txt").read_text() == "the course's\n"
    (kept,) = (student / "mine").iterdir()
    assert (kept / "README.md").read_text() == "my notes\n" and (kept / "notes.txt").read_text() == "mine\n"
    assert json.loads((kept / LAB).read_bytes()) == lab
    assert "00_ranks_lab.ipynb: 1 exercise and 1 cell of your own are in the new version" in done[1]
    assert update.update(student) == ["You have the newest version."]


def test_an_exercise_that_is_gone_is_kept_as_a_cell(course, student):
    lab = read(student)
    next(cell for cell in lab["cells"] if cell["id"] == "lab-004")["source"] = ["def sum_over_ranks(value): return 1.0"]
    write(student, lab)
    newer = read(course)
    newer["cells"] = [cell for cell in newer["cells"] if cell["id"] != "lab-004"]
    del newer["metadata"]["course"]["originals"]["lab-004"]
    write(course, newer)
    git(course, "commit", "-am", "second")
    assert "0 exercises and 1 cell of your own" in update.update(student)[1]
    assert source_of(read(student), "lab-004") == "def sum_over_ranks(value): return 1.0"


def test_where_it_cannot_begin_it_changes_nothing(course, student, tmp_path):
    with pytest.raises(update.CannotUpdate, match="not a clone"):
        update.update(tmp_path)
    second_version(course)
    (student / "own.txt").write_text("mine")
    git(student, "add", "-A")
    git(student, "commit", "-m", "own")
    with pytest.raises(update.CannotUpdate, match="commits of your own, so git must merge: run `git pull`"):
        update.update(student)
    assert (student / "README.md").read_text() == "first\n"
    git(student, "branch", "--unset-upstream")
    with pytest.raises(update.CannotUpdate, match="follows no other: run `git branch --set-upstream-to"):
        update.update(student)
