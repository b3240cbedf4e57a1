"""Unpack the course as a student of one chapter has it: the bundle of `make release`, and the judge's own files.

Students' code runs in this folder. It cannot import a solution that the lab still asks for, because the bundle does not
contain it.
"""

import compileall
import contextlib
import hashlib
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from instructor import release
from instructor.build import Chapter, chapters, lab_of, module_names, solution_of
from instructor.grade import static_checks
from instructor.grade.reader import exercises_in, without_first_magics
from instructor.grade.tasks import Task, tasks_of

HERE = Path(__file__).parent
# Files of this folder that affect neither verdicts nor the points before the instructor's decisions
SHOWING = ("__init__", "__main__", "archives", "lms_zips", "choice", "command", "dashboard", "export")
SHOWING += ("finding", "gradebook", "gradescope", "nbgrader_course", "outputs", "platforms", "policy")
SHOWING += ("returns", "tables")
JUDGE = ("__init__", "reader", "judge", "assembly", "drawing", "forked_server", "isolation", "limits")
JUDGE += ("network_meter", "safe_loading", "static_checks", "store_proxy")


@dataclass(frozen=True)
class Course:
    """An unpacked course, with which one lab is judged."""

    chapter: Chapter
    folder: Path
    digest: str
    tasks: tuple[Task, ...]
    withheld: tuple[str, ...]  # the modules of solutions/ that are not in the bundle
    ready_made: tuple[str, ...]  # the names of ready-made code that the lab itself uses
    stubs: dict[str, str]  # what students find in each exercise, by its grade_id
    ours: dict[str, str]  # our own code for each exercise, by its grade_id
    uses: dict[str, set[str]]  # for each exercise, the others that our own code for it uses, all by their grade_id


@contextlib.contextmanager
def unpacked(chapter: Chapter) -> Iterator[Course]:
    """Write a chapter's course into a temporary folder that every user may read.

    Raises:
        release.ReleaseError: if the chapter's bundle cannot be made.
    """
    files, tasks = files_of(chapter), tuple(tasks_of(chapter))
    stubs, ours = exercises_in(lab_of(chapter)), exercises_in(solution_of(chapter))
    to_come = [other for other in chapters() if other.name >= chapter.name]
    withheld = tuple(f"solutions.{module}" for other in to_come for module in module_names(other))
    with tempfile.TemporaryDirectory(prefix="course-") as temporary:
        folder = Path(temporary)
        for name, data in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        compileall.compile_dir(folder, quiet=1)  # Compile once here instead of once in each sandbox.
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        ready_made, uses = ready_made_in(chapter), uses_in(chapter, ours)
        yield Course(chapter, folder, digest_of(chapter, files), tasks, withheld, ready_made, stubs, ours, uses)


def files_of(chapter: Chapter) -> dict[str, bytes]:
    """Return the files of a chapter's course, by their path in it.

    Raises:
        release.ReleaseError: if the chapter's bundle cannot be made.
    """
    bundle = release.bundle(release.number_of(chapter))
    scripts = [name for name in bundle if name.startswith("labs/") and name.endswith(".py")]
    files = {name: data for name, data in bundle.items() if name not in scripts}  # They show parts of exercises.
    files |= {f"instructor/grade/{name}.py": (HERE / f"{name}.py").read_bytes() for name in JUDGE}
    files["instructor/__init__.py"] = (HERE.parent / "__init__.py").read_bytes()
    # `shared.mine` imports from mine/, which has a student's own pieces in the student's folder.
    return files | {name.replace("solutions/", "mine/", 1): files[name] for name in files if "solutions/" in name}


def ready_made_in(chapter: Chapter) -> tuple[str, ...]:
    """Return which ready-made code a lab's exercises may use: whatever our own solutions or the given code use."""
    source = "\n".join(cell.source for cell in _module_cells(chapter))
    words = {*re.findall(r"\w+", source)}
    modules = [name for name in static_checks.READY_MADE_MODULES if name in source]
    return (*(name for name in static_checks.READY_MADE if name in words), *modules)


def uses_in(chapter: Chapter, ours: dict[str, str]) -> dict[str, set[str]]:
    """Return the other exercises that our own code for each exercise uses, directly or through other cells."""
    cells = [(cell.metadata.get("nbgrader", {}).get("grade_id"), cell.source) for cell in _module_cells(chapter)]
    sources = [(name, ours.get(name) or without_first_magics(source)) for name, source in cells]
    code = [(name, static_checks.lends(source), static_checks.used_by(source)) for name, source in sources]
    return {name: {used for used in _used_from(name, code) if used and used != name} for name in ours}


def _used_from(name: str, code: list[tuple[str | None, set[str], set[str]]]) -> set[str | None]:
    """Return the names of the cells that a cell uses, directly or through others.

    Args:
        name: The name of the cell.
        code: For each cell, its name, the names that it defines and the names that it uses.
    """
    wanted = {used for own, _, uses in code for used in uses if own == name}
    for _ in code:  # One more cell is followed in each round.
        wanted |= {used for _, defines, uses in code for used in uses if defines & wanted}
    return {own for own, defines, _ in code if defines & wanted}


def _module_cells(chapter: Chapter) -> list[nbformat.NotebookNode]:
    """Return the cells of a lab's module, with our own code in the exercises."""
    tags = {"export", "exercise", "given"}
    return [cell for cell in chapter.read("lab").cells if tags & set(cell.metadata.get("tags", []))]


def digest_of(chapter: Chapter, files: dict[str, bytes]) -> str:
    """Return a digest of all that verdicts and points depend on. When it changes, everybody is graded again.

    Texts do not count, nor does code that sorts what was handed in or shows what was found.

    Args:
        chapter: The chapter whose lab is graded.
        files: The files of its course.
    """
    code = [cell.source for cell in chapter.read("lab").cells if cell.cell_type == "code"]
    content = hashlib.sha256(repr((code, tuple(tasks_of(chapter)))).encode())
    graders = {f"grader/{path.name}": path.read_bytes() for path in HERE.glob("*.py") if path.stem not in SHOWING}
    judging = {name: data for name, data in files.items() if name.startswith(("shared/", "solutions/"))}
    for name, data in sorted((judging | graders).items()):
        content.update(name.encode() + b"\0" + data + b"\0")
    return content.hexdigest()
