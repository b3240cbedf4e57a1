"""Find out in a second whether a run of the grader has anything to do, before torch is imported.

A run that grades everything leaves a stamp: a digest of the sizes and times of all files that it read or wrote. While
the stamp is the same, another run would change nothing.
"""

import argparse
import hashlib
import os
import sys
from pathlib import Path

from instructor.grade.limits import Limits

ROOT = Path(__file__).resolve().parents[2]
WHAT = "Grade students' notebooks: `make grade SUBMISSIONS=dir [CHAPTER=04]`, dir/<student>/<lab>/<notebook>.ipynb."
ANONYMOUS = "also write pages and tables with codes instead of names; names in code and error messages stay"
READ = ("instructor", "shared", "solutions", "source", "chapters", "labs", "README.md", "Makefile", "pyproject.toml")
STAMP = ".unchanged"  # in the folder of grades


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of the grader."""
    found = argparse.ArgumentParser(prog="python -m instructor.grade", description=WHAT)
    found.add_argument("submissions", type=Path, help="a folder with one folder per student, and perhaps course.toml")
    found.add_argument("--chapter", type=int, help="such as 04; default: every lab for which there is a notebook")
    found.add_argument("--into", type=Path, default=ROOT / "build" / "grades", help="default: build/grades")
    found.add_argument("--student", action="append", help="grade only this student again; may be given several times")
    found.add_argument("--exercise", help="grade this exercise again, such as 2.4, and keep the other verdicts")
    found.add_argument("--anonymous", action="store_true", help=ANONYMOUS)
    found.add_argument("--jobs", type=int, help="how many submissions to grade at once; default: two per core")
    found.add_argument("--seconds", type=float, default=Limits.seconds_each, help="time limit for one exercise")
    return found


def is_unchanged(options: argparse.Namespace) -> bool:
    """Return whether the last run with these options graded everything, and no file has changed since then."""
    try:
        kept = (options.into / STAMP).read_text(encoding="utf-8")
        return not options.student and not options.exercise and kept == _stamp(options)
    except OSError:
        return False


def remember(options: argparse.Namespace) -> None:
    """Note that a run with these options has graded everything."""
    (options.into / STAMP).write_text(_stamp(options), encoding="utf-8")


def _stamp(options: argparse.Namespace) -> str:
    found = hashlib.sha256(repr((sys.version, sys.prefix, vars(options) | {"jobs": None})).encode("utf-8", "replace"))
    for top in (*(ROOT / name for name in READ), options.submissions, options.into):
        for path in sorted(_files_in(top)):
            about = path.lstat()
            line = f"{path}\0{about.st_size}\0{about.st_mtime_ns}\n"
            found.update(line.encode(errors="surrogateescape"))
    return found.hexdigest()


def _files_in(top: Path) -> list[Path]:
    """List the files in a folder, without compiled modules, and without hidden ones such as the lock of the grades."""
    if top.is_file():
        return [top]
    found = []
    for parent, folders, names in os.walk(top):
        folders[:] = [name for name in folders if name != "__pycache__"]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return found
