"""The course's table of contents: the number, name and title of each chapter, including planned ones.

The numbers are final. A planned chapter reserves its number, so prose may refer to it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# A chapter's three notebooks have different names, so that their tabs in an editor can be told apart.
_ENDINGS = {"chapters": "", "labs": "_lab", "solutions": "_solution"}


def notebook(kind: str, folder: str) -> str:
    """Return the path of a chapter's notebook, such as "labs/04_overlap_lab.ipynb".

    Args:
        kind: "chapters" for the lesson, "labs" or "solutions".
        folder: The name of the chapter's folder, such as "04_overlap".
    """
    return f"{kind}/{folder}{_ENDINGS[kind]}.ipynb"


def folder_of(path: Path) -> str:
    """Return the name of the chapter's folder, such as "04_overlap", for the path of one of its notebooks."""
    return path.stem.removesuffix(_ENDINGS[path.parent.name])


@dataclass(frozen=True)
class Chapter:
    """A chapter that exists or is planned. If it exists, it is in source/<folder>/."""

    number: int
    name: str
    title: str

    @property
    def folder(self) -> str:
        return f"{self.number:02d}_{self.name}"

    @property
    def part(self) -> str:
        return PARTS[max(first for first in PARTS if first <= self.number)]


CHAPTERS = {
    number: Chapter(number, name, title)
    for number, name, title in (
        (0, "ranks", "Ranks"),
        (1, "collectives", "Collectives by hand"),
        (2, "manual_ddp", "Data parallelism by hand"),
        (3, "gradient_bucketing", "Gradient bucketing"),
        (4, "overlap", "Overlap"),
        (5, "scaling", "Scaling"),
        (6, "memory_wall", "The memory wall"),
        (7, "zero1", "ZeRO-1"),
        (8, "zero2", "ZeRO-2"),
        (9, "zero3", "ZeRO-3"),
        (10, "fsdp", "FSDP"),
        (11, "production", "Production"),
        (12, "checkpoints", "Checkpoints"),
        (13, "tensor_parallel", "Tensor parallelism"),
        (14, "context_parallel", "Context parallelism"),
        (15, "pipeline_parallel", "Pipeline parallelism"),
        (16, "expert_parallel", "Expert parallelism"),
        (17, "gspmd", "GSPMD"),
        (18, "3d_parallelism", "3D parallelism"),
        (19, "less_communication", "Less communication"),
        (20, "beyond_one_machine", "Beyond one machine"),
    )
}

# The parts of the course, by the number of their first chapter.
PARTS = {0: "Data parallelism", 6: "Sharding", 13: "Splitting the model", 19: "Further"}

_KINDS = r"\b(?P<kind>chapter|lab|lesson)s? "
_NUMBERS = r"(?P<numbers>\d+(?:(?:, | and | or | to |–)\d+)*)(?![\d.]*\d)"
_NAMED = r"(?: \((?P<name>\w+)\)| · (?P<title>[^\n.,:;()\[\]|*\"]+))?"
_REFERENCE = re.compile(_KINDS + _NUMBERS + _NAMED, re.IGNORECASE)
_EXERCISES = re.compile(r"\bexercises? (?P<numbers>\d+\.\d+(?:(?:, | and | or | to |–)\d+\.\d+)*)", re.IGNORECASE)


def wrong_references(text: str, exercises: set[str]) -> Iterator[str]:
    """Yield a description of every reference to a chapter, lab, lesson or exercise that does not exist.

    Args:
        text: Prose or code. A reference may be split over two lines.
        exercises: The numbers of the exercises that exist, such as "7.2".
    """
    text = re.sub(r"\n[ \t]*(?:#+ ?)?", " ", text)
    for found in _REFERENCE.finditer(text):
        for number in re.findall(r"\d+", found["numbers"]):
            if len(number) != 2 or int(number) not in CHAPTERS:
                yield f"{found[0].strip()!r}: there is no chapter {number}"
        last = CHAPTERS.get(int(found["numbers"][-2:]))
        if last is not None and (problem := _misnamed(found, last)):
            yield f"{found[0].strip()!r}: {problem}"
    for found in _EXERCISES.finditer(text):
        for number in re.findall(r"\d+\.\d+", found["numbers"]):
            if number not in exercises:
                yield f"{found[0]!r}: there is no exercise {number}"


def _misnamed(found: re.Match, chapter: Chapter) -> str:
    """Return what is wrong with the name or title after a reference, or "".

    Lab headings have titles of their own. A word in parentheses counts only if it is the name of a chapter.
    """
    names = {other.name for other in CHAPTERS.values()}
    if found["name"] in names - {chapter.name}:
        return f"chapter {chapter.number:02d} is {chapter.name}"
    if found["title"] and found["kind"].lower() != "lab" and not found["title"].startswith(chapter.title):
        return f"chapter {chapter.number:02d} is {chapter.title!r}"
    return ""
