"""Find out whether a student's code makes the interpreter do what it does now: itself, or through a library.

Libraries may use frames, write code and start threads. A student's code may not make them do it, by passing them a
function or a code object, or in a thread that it starts. A library's function that acts on its own contains the name of
what it does.
"""

import sys
import sysconfig
import threading
import weakref
from importlib.util import cache_from_source
from marshal import loads
from pathlib import Path
from types import CodeType, FrameType

COURSE = str(Path(__file__).resolve().parents[2]) + "/"
SOLUTIONS = f"{COURSE}solutions/"
OWN = {f"{Path(__file__).parent}/{name}.py" for name in ("attribution", "tripwire")}
STANDARD = tuple(sysconfig.get_paths()[key] + "/" for key in ("stdlib", "platstdlib"))
PACKAGES = tuple(sysconfig.get_paths()[key] + "/" for key in ("purelib", "platlib"))
FROZEN = "<frozen "
TRUSTED = (COURSE, *STANDARD, *PACKAGES, FROZEN)
WRITTEN = "<string>"  # the file name of code that is compiled from a string
THREADS = tuple(f"{folder}threading.py" for folder in STANDARD)
# Functions of libraries that hand out frames, so that whoever calls them gets these
HANDING = ("currentframe", "stack", "trace", "getframeinfo", "getinnerframes", "getouterframes", "walk_tb")
HANDING += ("walk_stack", "<lambda>")
_HEADER_BYTES = 16  # of a .pyc file
_getframe = sys._getframe
# tripwire.py replaces some of these attributes.
_before, _locals_of = (FrameType.__dict__[name].__get__ for name in ("f_back", "f_locals"))
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # that a student's code has started


def is_library(file: str) -> bool:
    """Return whether a file belongs to Python or to an installed package."""
    return file.startswith((*STANDARD, *PACKAGES, FROZEN))


def is_standard(file: str) -> bool:
    """Return whether a file belongs to Python itself."""
    return file.startswith(STANDARD) and not file.startswith(PACKAGES)


def innermost(passed=lambda file: False) -> FrameType | None:
    """Return the innermost frame that is neither of this package nor of the files to be passed over."""
    frame = _getframe(1)
    while frame is not None and (file_of(frame) in OWN or passed(file_of(frame))):
        frame = _before(frame)
    return frame


def file_of(frame: FrameType) -> str:
    return frame.f_code.co_filename


def is_students(frame: FrameType) -> bool:
    """Return whether a frame runs a student's code.

    Only libraries may run code that is compiled from a string, such as the methods of data classes: see tripwire.py.
    """
    return not file_of(frame).startswith((*TRUSTED, WRITTEN))


def through_student(frame: FrameType | None = None) -> bool:
    """Return whether a student's code waits for what is done now, or has started this thread."""
    frame = frame or innermost()
    if frame is None:  # A thread of C++ calls what it was given.
        return True
    while frame is not None:
        if is_students(frame):
            return True
        bottom, frame = frame, _before(frame)
    if file_of(bottom) == WRITTEN:  # Nothing of ours has called it.
        return True
    return bottom.f_code.co_filename in THREADS and _locals_of(bottom).get("self") in _threads


def by_student(*names: str, passed=lambda file: False) -> bool:
    """Return whether a student's code does one of these things now, or lets a library do it that does not name it.

    Args:
        passed: Returns whether the functions of a file do not count.
    """
    frame = innermost(passed)
    while frame is not None and frame.f_code.co_name in HANDING and is_library(file_of(frame)):
        names, file, frame = (frame.f_code.co_name,), file_of(frame), _before(frame)
        if frame is not None and file_of(frame) == file and frame.f_code.co_name not in HANDING:
            return False  # The library uses its own function.
    if frame is None or is_students(frame):
        return True
    itself = file_of(frame) != WRITTEN and not {*names}.isdisjoint(frame.f_code.co_names)
    return not itself and through_student(frame)


def note_thread(function) -> bool:
    """Note that a student's code starts a thread. Returns whether it does so in the usual way, with a Thread."""
    thread = getattr(function, "__self__", None)
    if not isinstance(thread, threading.Thread):
        return False
    _threads.add(thread)
    return True


def is_genuine(code: CodeType) -> bool:
    """Return whether the code of a module is that of the file that it names."""
    file = code.co_filename
    if file.startswith(FROZEN):
        return False  # Python has loaded all that it needs of these.
    try:
        compiled = Path(cache_from_source(file))
        if compiled.exists():
            return loads(compiled.read_bytes()[_HEADER_BYTES:]) == code
        return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True) == code
    except (OSError, ValueError, SyntaxError, EOFError, TypeError):
        return False
