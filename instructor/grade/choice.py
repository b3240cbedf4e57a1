"""Choose which of a student's notebooks is graded: the lab that was worked on, wherever it is and whatever its name is.

A student who hands in a whole folder also hands in lessons, the course's solutions, and labs as they were handed out.
What a notebook is shows in its content: a lesson has no exercises, and an untouched lab has the cells that were handed
out. A lesson or a solution of the course is never chosen. Otherwise, the best notebook is one that was worked on. Among
these, the name that was handed out counts first, then the time, then how many exercises were edited.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import PurePosixPath

from instructor.build import Chapter, chapters, lab_of
from instructor.grade.reader import Unreadable, code_cells_in, exercises_in, without_first_magics

MOST_NAMES = 5  # in one sentence
MOST_CONTAINERS = 300_000  # objects and lists of a notebook that is read here; a large one has 20,000
GRADE_ID = re.compile(rb'"grade_id"\s*:\s*"([^"]+)"')
LESSON = re.compile(rb'"source"\s*:\s*"source/\w+/lesson\.py"')
COPY_NUMBER = re.compile(r"(?:\(|-|-Copy| )(\d+)\)?$")


class Kind(IntEnum):
    """What a notebook is, as seen from one lab. A larger one is chosen first."""

    LESSON = 0
    SOLUTION = 1
    OTHER = 2
    UNTOUCHED = 3
    BROKEN = 4  # Its author probably worked on it, and should be told that it cannot be read.
    WORKED_ON = 5


LABELS = {
    Kind.LESSON: "the lesson",
    Kind.SOLUTION: "the course's own solution",
    Kind.OTHER: "without this lab's exercises",
    Kind.UNTOUCHED: "as it was handed out",
    Kind.BROKEN: "not readable",
}


@dataclass(frozen=True)
class Notebook:
    """A file that a student handed in."""

    name: str  # its path below the student's folder
    data: bytes  # empty if it must not be read
    when: float = 0.0  # seconds since the epoch


@dataclass(frozen=True)
class Choice:
    """The notebook that is graded, if there is one, and what was decided about the others."""

    notebook: Notebook | None
    kind: Kind | None
    others: tuple[tuple[Notebook, str], ...]  # each with why it was not chosen

    @property
    def sentence(self) -> str:
        """Say what was chosen and why, or "" if there was nothing to choose."""
        if self.notebook is None or not self.others:
            return ""
        shown = [f"{other.name} ({why})" for other, why in self.others[:MOST_NAMES]]
        more = len(self.others) - len(shown)
        listed = ", ".join(shown) + (f" and {more} more" if more else "")
        return (
            f"{self.notebook.name} is graded, and {'these are' if len(self.others) > 1 else 'this is'} not: {listed}."
        )


def choose(notebooks: Sequence[Notebook], chapter: Chapter) -> Choice:
    """Choose one of a student's notebooks for a lab. The last one wins if nothing distinguishes them."""
    ranked = sorted(((_rank(each, chapter), at, each) for at, each in enumerate(notebooks)), key=lambda item: item[:2])
    candidates = [(rank, each) for rank, _, each in reversed(ranked)]
    if not candidates or candidates[0][0][0] <= Kind.SOLUTION:
        return Choice(None, None, tuple((each, LABELS[rank[0]]) for rank, each in candidates))
    (best, chosen), *others = candidates
    return Choice(chosen, best[0], tuple((each, _why_not(each, rank, chosen, best)) for rank, each in others))


def lab_in(data: bytes) -> Chapter | None:
    """Return the lab whose exercises a notebook contains, or None."""
    names = {name.decode(errors="replace") for name in GRADE_ID.findall(data)}
    shared = sorted(((len(names & set(stubs)), name) for name, stubs in _stubs_of_all().items()), reverse=True)
    (most, lab), (next_most, _) = shared[:2]
    return Chapter(lab) if most > next_most else None


def _rank(notebook: Notebook, chapter: Chapter) -> tuple:
    """Return what decides between notebooks, the most important thing first."""
    kind, edited = _kind(notebook, chapter)
    stem = PurePosixPath(notebook.name).stem
    number = COPY_NUMBER.search(stem)
    return kind, f"{chapter.name}_lab" in stem, notebook.when // 60, edited, int(number[1][:9]) if number else 0


def _why_not(other: Notebook, rank: tuple, chosen: Notebook, best: tuple) -> str:
    if other.data == chosen.data and other.data:
        return "the same"
    if rank[0] != best[0]:
        return LABELS.get(rank[0], "")
    reasons = ("", "its name is not the one that was handed out", "older", "fewer exercises were edited")
    differs = next((at for at, (own, its) in enumerate(zip(rank, best, strict=True)) if own != its), len(reasons))
    return reasons[differs] if differs < len(reasons) else "an earlier copy"


def _kind(notebook: Notebook, chapter: Chapter) -> tuple[Kind, int]:
    """Return what a notebook is, and how many of the lab's exercises were edited in it."""
    path, data, stubs = PurePosixPath(notebook.name), notebook.data, stubs_of(chapter)
    if b'"built_from"' in data and ("_solution" in path.stem or "solutions" in path.parts[:-1]):
        return Kind.SOLUTION, 0
    found = {name.decode(errors="replace") for name in GRADE_ID.findall(data)}
    if LESSON.search(data) and not found:
        return Kind.LESSON, 0
    if found and not found & set(stubs):
        return Kind.OTHER, 0
    cells = _cells_in(data)
    if cells is None:
        return Kind.BROKEN, 0
    sources = {cell["name"]: cell["source"].strip() for cell in cells if cell["name"] in stubs}
    if not sources:
        return Kind.OTHER, 0
    edited = sum(source != stubs[name].strip() for name, source in sources.items())
    if not edited:  # The answers may be in cells of their own.
        given = _given_cells(chapter)
        edited = int(any(cell["source"].strip() not in given for cell in cells if not cell["name"]))
    return (Kind.WORKED_ON if edited else Kind.UNTOUCHED), edited


def _cells_in(data: bytes) -> list[dict] | None:
    """Return a notebook's code cells, or None if it cannot be read, or only with much memory."""
    if data.count(b"{") + data.count(b"[") > MOST_CONTAINERS:
        return None
    try:
        return code_cells_in(data)
    except Unreadable:
        return None


@functools.cache
def stubs_of(chapter: Chapter) -> dict[str, str]:
    """Return what students find in each exercise of a lab, by its grade_id."""
    return exercises_in(lab_of(chapter))


@functools.cache
def _given_cells(chapter: Chapter) -> set[str]:
    """Return the code of a lab's other cells as it was handed out."""
    cells = [cell for cell in lab_of(chapter).cells if cell.cell_type == "code"]
    return {"", *(without_first_magics(cell.source).strip() for cell in cells)}


@functools.cache
def _stubs_of_all() -> dict[str, dict[str, str]]:
    return {chapter.name: stubs_of(chapter) for chapter in chapters()}
