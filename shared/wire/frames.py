"""Finds the stack frames that belong to the student's code, and formats their source lines."""

import linecache
import os
import sysconfig
from pathlib import Path

_COURSE_SHARED = str(Path(__file__).resolve().parents[1]) + os.sep
_PYTHON = tuple(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_cell(filename: str) -> bool:
    """Return whether IPython gave this file name to a cell when it compiled it."""
    return "ipykernel_" in filename or filename.startswith("<ipython")


def is_student_file(filename: str) -> bool:
    """Return whether the file is a notebook cell or the student's own, not one of Python, a package or the course."""
    return is_cell(filename) or (os.path.isabs(filename) and not filename.startswith((_COURSE_SHARED, *_PYTHON)))


def where(filename: str, line_number: int, function: str = "<module>") -> str:
    """Describe a line as `cell, line 3: dist.all_reduce(x)`, or as `average, line 2: …` inside a function of a cell."""
    in_cell = is_cell(filename) or filename.startswith("<")
    name = os.path.basename(filename) if not in_cell else "cell" if function == "<module>" else function
    linecache.checkcache(filename)  # A file may be written again.
    code = linecache.getline(filename, line_number).strip()
    return f"{name}, line {line_number}" + (f": {code}" if code else "")


def innermost_student_frame(frame):
    """Return the first frame in the student's code, walking outwards from a frame, or None."""
    while frame is not None and not is_student_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
