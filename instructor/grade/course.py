"""The course as a student of one chapter has it, for their code to run in: the bundle of `make release`.

So a solution that is still asked for cannot be imported: it is not there. The judge's own files are added.
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
    """What one lab is judged with."""

    chapter: Chapter
    folder: Path
    digest: str
    tasks: tuple[Task, ...]
    withheld: tuple[str, ...]  # the modules of solutions/ that are not in the bundle


@contextlib.contextmanager
def unpacked(chapter: Chapter) -> Iterator[Course]:
    """Write a chapter's course into a temporary folder that everybody may read.

    Raises: release.ReleaseError
    """
    files = release.bundle(release.number_of(chapter))
    files |= {f"instructor/grade/{name}": (HERE / name).read_bytes() for name in JUDGE}
    files["instructor/__init__.py"] = (HERE.parent / "__init__.py").read_bytes()
    content = hashlib.sha256()
    graders = {f"grader/{path.name}": path.read_bytes() for path in HERE.glob("*.py")}  # points are theirs to give
    for name, each in sorted((files | graders).items()):
        content.update(name.encode() + b"\0" + each + b"\0")
    to_come = [each for each in chapters() if each.name >= chapter.name]
    withheld = tuple(f"solutions.{module}" for each in to_come for module in module_names(each))
    with tempfile.TemporaryDirectory(prefix="course-") as made:
        folder = Path(made)
        for name, each in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(each)
        compileall.compile_dir(folder, quiet=1)  # once, and not in each sandbox
        for each in (folder, *folder.rglob("*")):
            each.chmod(0o755 if each.is_dir() else 0o644)
        yield Course(chapter, folder, content.hexdigest(), tuple(tasks_of(chapter)), withheld)
