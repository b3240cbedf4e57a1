"""Which lines of a stack are the student's own, and what they say."""

import linecache
import os
import sysconfig
from pathlib import Path

_COURSE_SHARED = str(Path(__file__).resolve().parents[1]) + os.sep
_PYTHON = tuple(sysconfig.get_paths()[key] + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib"))


def is_cell(filename: str) -> bool:
    """True for the name that IPython gives a cell when it compiles it."""
    return "ipykernel_" in filename or filename.startswith("<ipython")


def is_students(filename: str) -> bool:
    """True for a notebook cell or a file of the student's; False for Python's, a package's, the course's."""
    return is_cell(filename) or (os.path.isabs(filename) and not filename.startswith((_COURSE_SHARED, *_PYTHON)))


def where(filename: str, line_number: int, function: str = "<module>") -> str:
    """Name a line: `cell, line 3: dist.all_reduce(x)`, or `average, line 2: …`, of the cell that defines average."""
    in_cell = is_cell(filename) or filename.startswith("<")
    place = os.path.basename(filename) if not in_cell else "cell" if function == "<module>" else function
    code = linecache.getline(filename, line_number).strip()
    return f"{place}, line {line_number}" + (f": {code}" if code else "")


def innermost_students(frame):
    """Walk a stack outwards to the first frame of the student's. → frame, or None."""
    while frame is not None and not is_students(frame.f_code.co_filename):
        frame = frame.f_back
    return frame
