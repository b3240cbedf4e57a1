"""Write START_HERE.md, the page that `make lab` opens: `make notebooks`, or `python -m instructor.start_page`.

    python -m instructor.start_page            write the page
    python -m instructor.start_page --check    write nothing; exit 1 if the page is out of date

The page explains how to use the course, and lists its chapters. Titles come from instructor/contents.py, minutes from
the lessons and labs, what a lab builds from README.md's table, and how long steps take from benchmarks/README.md.
Drafts are left out.
"""

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import jinja2

from instructor import contents, pages
from instructor.build import ROOT, Chapter, chapters

WORDS_PER_MINUTE = 130
SECONDS_PER_CODE_LINE = 12
SECONDS_PER_PICTURE = 20  # a figure or a table
SECONDS_PER_PREDICTION = 45
# Readers of all lessons estimated 72 to 106% of the sum of these numbers, 86% on average. Nobody has been timed yet.
FASTEST, SLOWEST = 0.70, 1.05
_SHOWS = re.compile(r"^(?:\w*plots\.|tables\.|diagrams\.|widgets\.|\w+$)")  # the last line of a cell with a picture


@dataclass(frozen=True)
class Minutes:
    """A range, printed as 45–65, or as one number if both ends are equal."""

    fastest: int
    slowest: int

    def __str__(self) -> str:
        return "–".join(map(str, sorted({self.fastest, self.slowest})))


def lesson_minutes(chapter: Chapter) -> Minutes:
    """Estimate a lesson's minutes from its words, its lines of code, its figures and tables, and its predictions.

    If readers disagree with the estimate, the head of the lesson's source says what they need.
    """
    lesson = chapter.read("lesson")
    if stated := lesson.metadata["course"].get("minutes"):
        return Minutes(*stated)
    cells = [cell for cell in lesson.cells if "claims" not in cell.metadata.get("tags", [])]
    prose = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    codes = [cell.source for cell in cells if cell.cell_type == "code"]
    lines = [line for code in codes for line in code.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    pictures = sum(bool(_SHOWS.match(code.splitlines()[-1])) for code in codes if code) + prose.count("\n|---")
    seconds = 60 * len(re.findall(r"\w+", prose)) / WORDS_PER_MINUTE + SECONDS_PER_CODE_LINE * len(lines)
    seconds += SECONDS_PER_PICTURE * pictures + SECONDS_PER_PREDICTION * prose.count("**Predict.**")
    return Minutes(*(5 * round(share * seconds / 300) for share in (FASTEST, SLOWEST)))


def lab_minutes(chapter: Chapter) -> int:
    """Read a lab's minutes from the head of its source."""
    return chapter.read("lab").metadata["course"]["minutes"]


def together(ranges: Iterable[Minutes]) -> Minutes:
    ranges = list(ranges)
    return Minutes(sum(each.fastest for each in ranges), sum(each.slowest for each in ranges))


PAGE = ROOT / "START_HERE.md"
TEMPLATE = Path(__file__).parent / "templates" / "start_page.md.jinja"
FAST_PATH = ("00", "01", "02", "04", "07", "09")  # the numbers of the lessons that tell the story from DDP to ZeRO-3
# A diagram of the lessons for each part, saved once, and what it shows
PICTURES = {
    "Data parallelism": ("exposed_communication", "All-reduces that are launched during backward are partly hidden"),
    "Sharding": ("training_memory", "Memory over one step: the optimizer state and the parameters always stay"),
    "Splitting the model": ("mesh_3d", "Eight ranks in a mesh of 2 × 2 × 2: by data, by pipeline stage, by tensor"),
    "Further": ("low_rank", "A matrix of gradients as a product of two thin ones, which are sent instead"),
}
_ROW = re.compile(r"^\| (\d\d) \| \[.+?]\(chapters/\w+\.ipynb\) \| \[(.+?)]\(labs/", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A chapter as the page shows it."""

    number: str
    name: str  # such as "Gradient bucketing"
    part: str
    builds: str
    lesson_minutes: Minutes
    lab_minutes: int
    lesson: str  # the paths of its notebooks
    lab: str
    solution: str  # "" where the reader does not have it

    @property
    def is_fast(self) -> bool:
        return self.number in FAST_PATH

    @property
    def title(self) -> str:
        return f"{self.number} · {self.name}"


@dataclass(frozen=True)
class Part:
    """Consecutive chapters, and how long they take together."""

    name: str
    chapters: list[Row]

    @property
    def picture(self) -> str:
        name, shows = PICTURES[self.name]
        return f'<img src="docs/images/{name}.png" alt="{shows}" width="480">'

    @property
    def lesson_time(self) -> str:
        total = together(row.lesson_minutes for row in self.chapters)
        return (
            f"{total.fastest / 60:.0f} to {total.slowest / 60:.0f} hours" if total.slowest > 100 else f"{total} minutes"
        )

    @property
    def lab_time(self) -> str:
        return _time(sum(row.lab_minutes for row in self.chapters))


def _time(total_minutes: int) -> str:
    """Return minutes as text, in hours if there are many."""
    return f"{total_minutes} minutes" if total_minutes < 100 else f"{total_minutes / 60:.1f} hours"


def builds() -> dict[str, str]:
    """Return what the lab of each chapter builds, by the chapter's number, as README.md's table says."""
    return dict(_ROW.findall((ROOT / "README.md").read_text(encoding="utf-8")))


def step_ratios() -> dict[str, str]:
    """Return how long a step of TinyGPT on 4 ranks takes, as a multiple of DDP's.

    The numbers come from benchmarks/README.md. A grader in a container does not have it, and gets an empty dict.
    """
    page = ROOT / "benchmarks" / "README.md"
    results = page.read_text(encoding="utf-8") if page.exists() else ""
    return dict(re.findall(r"\| TinyGPT \| loopback \| 4 \| (\w+) \| [\d.]+ \| ([\d.]+) \|", results))


def page(of: Iterable[Chapter], exists: Callable[[str], bool], is_site: bool = False, address: str = "") -> str:
    """Return the start page for some chapters as Markdown.

    Args:
        of: The chapters that the reader has.
        exists: Tells whether the reader has a file of this path, such as "solutions/04_overlap_solution.ipynb".
        is_site: Write the page for the site, where the course can be read but not run.
        address: From where readers of the site can clone the course, if it is known.
    """
    finished = [chapter for chapter in of if not chapter.is_draft]
    rows = [_row(chapter, exists) for chapter in finished]
    parts = [Part(name, list(members)) for name, members in groupby(rows, lambda row: row.part)]
    shown = {chapter.name for chapter in finished}
    to_come = [chapter.title for chapter in contents.CHAPTERS.values() if chapter.folder not in shown]
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    fast = Part("", [row for row in rows if row.is_fast])
    fast_path = fast if len(fast.chapters) == len(FAST_PATH) else None  # a bundle may lack some of them
    return template.render(
        chapters=rows,
        parts=parts,
        fast_path=fast_path,
        to_come=to_come,
        step_ratios=step_ratios(),
        is_site=is_site,
        address=address,
    )


def _row(chapter: Chapter, exists: Callable[[str], bool]) -> Row:
    planned = next(entry for entry in contents.CHAPTERS.values() if entry.folder == chapter.name)
    number = f"{planned.number:02d}"
    lesson, lab, solution = (contents.notebook(kind, chapter.name) for kind in ("chapters", "labs", "solutions"))
    return Row(
        number=number,
        name=planned.title,
        part=planned.part,
        builds=builds()[number],
        lesson_minutes=lesson_minutes(chapter),
        lab_minutes=lab_minutes(chapter),
        lesson=lesson,
        lab=lab,
        solution=solution if exists(solution) else "",
    )


def main() -> int:
    return pages.main(
        PAGE,
        lambda: page(chapters(), exists=lambda path: True),
        "instructor.start_page",
        (__doc__ or "").split("\n")[0],
    )


if __name__ == "__main__":
    sys.exit(main())
