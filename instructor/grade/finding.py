"""Find the students' notebooks: `<folder>/<student>/<lab>/<notebook>.ipynb` as in nbgrader, or deeper in these folders.

A notebook is read here only to find out which lab it is for, and which one of several counts (choice.py).
"""

import itertools
import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path

from instructor.build import Chapter, chapters
from instructor.grade import choice
from instructor.grade.choice import Kind, Notebook
from instructor.grade.submissions import ARRIVAL, MOST_BYTES, NOT_HANDED_IN, Submission

MOST_FOLDERS = 500  # of a student


@dataclass(frozen=True)
class Note:
    """What a learning platform says about a notebook. `python -m instructor.grade.lms_zips` writes it beside it."""

    platform: str = ""
    returns: str = ""  # how the name of a file of feedback must begin
    late: bool = False
    choice: str = ""  # as in a submission

    def write(self, folder: Path) -> None:
        (folder / ARRIVAL).write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")


def note_of(submission: Submission) -> Note:
    """Return the note beside a notebook. It is empty if there is none."""
    if submission.path is None:
        return Note()
    try:
        return Note(**json.loads((submission.path.parent / ARRIVAL).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Note()


def find(folder: Path, lab: str) -> list[Submission]:
    """List every student's submission for a lab, sorted by name. Each folder is a student."""
    return [_submission(student, Chapter(lab), _lab_names()) for student in students_in(folder)]


def students_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def labs_in(folder: Path) -> list[Chapter]:
    """List the labs for which anybody handed in something. A lab as it was handed out counts only in a lab's folder."""
    labs = _lab_names()
    found = {lab for student in students_in(folder) for lab in labs if (student / lab).is_dir()}
    for student in students_in(folder):
        for path in _files_in(student, labs):
            lab = _lab_of(student, path, labs)
            if lab and lab not in found and _is_own_work(_notebook(student, path), Chapter(lab)):
                found.add(lab)
    return [Chapter(lab) for lab in labs if lab in found]


def _is_own_work(notebook: Notebook, lab: Chapter) -> bool:
    kind = choice.choose([notebook], lab).kind
    return kind is not None and kind > Kind.UNTOUCHED


def _lab_names() -> tuple[str, ...]:
    return tuple(chapter.name for chapter in chapters())


def _submission(student: Path, lab: Chapter, labs: tuple[str, ...]) -> Submission:
    """Find a student's notebook for a lab, wherever it is in the student's folder."""
    files = _files_in(student, labs)
    notebooks = {path: _notebook(student, path) for path in files if _lab_of(student, path, labs) == lab.name}
    chosen = choice.choose(list(notebooks.values()), lab)
    path = next((path for path, notebook in notebooks.items() if notebook is chosen.notebook), None)
    if path is not None:
        return Submission(student.name, lab.name, path, (), chosen.sentence)
    why = {notebook.name: f" ({reason})" for notebook, reason in chosen.others}
    tops = {path: path.relative_to(student).parts[0] for path in files}
    others = tuple(other for other in labs if other != lab.name)
    mine = sorted((top != lab.name, at) for at, top in enumerate(tops.values()) if not top.startswith(others))
    instead = [_shown(student, files[at]) for _, at in mine]
    return Submission(student.name, lab.name, None, tuple(f"{name}{why.get(name, '')}" for name in instead))


def _files_in(student: Path, labs: tuple[str, ...]) -> list[Path]:
    """List a student's files, except for those that programs hide or leave behind.

    A link in place of a lab's folder counts as a file, so that the student is told about it. No link is followed.
    """
    found = []
    for parent, folders, names in itertools.islice(os.walk(student), MOST_FOLDERS):
        names += [name for name in folders if name in labs and Path(parent, name).is_symlink()]
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        own = [name for name in sorted(names) if not name.startswith(".") and name not in NOT_HANDED_IN]
        found += [Path(parent, name) for name in own]
    return found


def _lab_of(student: Path, path: Path, labs: tuple[str, ...]) -> str | None:
    """Return the lab that a notebook is for: that of its folder, of its name, or of its exercises."""
    top = path.relative_to(student).parts[0]
    if path.suffix.lower() != ".ipynb":
        return top if top in labs and path.is_symlink() and path.parent == student else None
    named = next((lab for lab in labs if path.stem.startswith(lab)), None)
    if top in labs and named in (None, top):
        return top  # In a lab's folder, a notebook may have any name but another lab's.
    if named is None or top in labs:
        inside = choice.lab_in(_notebook(student, path).data)
        named = inside.name if inside else None
    return named if top not in labs or named == top else None


def _notebook(student: Path, path: Path) -> Notebook:
    """Return a notebook to choose from. Only a regular file is read, and none that is too large."""
    try:
        about = path.lstat()
        readable = stat.S_ISREG(about.st_mode) and about.st_size <= MOST_BYTES
        return Notebook(_shown(student, path), path.read_bytes() if readable else b"", about.st_mtime)
    except OSError:
        return Notebook(_shown(student, path), b"")


def _shown(student: Path, path: Path) -> str:
    """Return a file's path as the student knows it, without the folder that names the lab."""
    parts = path.relative_to(student).parts
    return "/".join(parts[1:] if len(parts) > 1 and parts[0] in _lab_names() else parts)
