"""Unpack the course as a student of one chapter has it: the bundle of `make release`, and the judge's own files.

Students' code runs in this folder. It cannot import a solution that the lab still asks for, because the bundle does not
contain it.
"""

import compileall
import contextlib
import hashlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from instructor import release
from instructor.build import Chapter, chapters, module_names
from instructor.grade.tasks import Task, tasks_of

HERE = Path(__file__).parent
JUDGE = ("__init__.py", "judge.py", "guard.py", "fingerprints.py", "screen.py", "limits.py")


@dataclass(frozen=True)
class Course:
    """An unpacked course, with which one lab is judged."""

    chapter: Chapter
    folder: Path
    digest: str
    tasks: tuple[Task, ...]
    withheld: tuple[str, ...]  # the modules of solutions/ that are not in the bundle


@contextlib.contextmanager
def unpacked(chapter: Chapter) -> Iterator[Course]:
    """Write a chapter's course into a temporary folder that every user may read.

    Raises:
        release.ReleaseError: if the chapter's bundle cannot be made.
    """
    files = release.bundle(release.number_of(chapter))
    files |= {f"instructor/grade/{name}": (HERE / name).read_bytes() for name in JUDGE}
    files["instructor/__init__.py"] = (HERE.parent / "__init__.py").read_bytes()
    content = hashlib.sha256()
    graders = {f"grader/{path.name}": path.read_bytes() for path in HERE.glob("*.py")}  # They decide the points.
    for name, data in sorted((files | graders).items()):
        content.update(name.encode() + b"\0" + data + b"\0")
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
        yield Course(chapter, folder, content.hexdigest(), tuple(tasks_of(chapter)), withheld)
