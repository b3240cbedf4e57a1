"""The folder of the notebook, and the folder with the logs and files of a set of ranks."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

COURSE_ROOT = Path(__file__).resolve().parents[2]
_PREFIX = "ranks-"
_IN_USE = "in-use"  # Every process of the set holds a lock on this file, so that nobody takes its folder for a stale one.


def current() -> str:
    """Return the folder of the notebook, or "" if it has been removed."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return ""


def python_path() -> str:
    """Return a PYTHONPATH with which ranks find `shared` and `solutions` from any directory.

    The current folder is left out, because a student may keep a random.py there. Ranks find its other files, because
    ipyparallel begins their path with the folder that they are in.
    """
    inherited = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    here = current()
    return os.pathsep.join([str(COURSE_ROOT), *(entry for entry in inherited if entry != here)])


def create() -> tuple[str, int]:
    """Create the folder of a set of ranks. Returns its path, and the open file with which processes hold it.

    Folders that were left behind are removed: those of this user whose processes are all gone, because a kernel and
    its fork server were killed together.
    """
    _sweep(tempfile.gettempdir())
    path = tempfile.mkdtemp(prefix=_PREFIX)
    file = os.path.join(path, _IN_USE)
    held = os.open(f"{file}-soon", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(held, fcntl.LOCK_SH)
    os.rename(f"{file}-soon", file)  # It never exists without a lock.
    return path, held


def _sweep(parent: str) -> None:
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            if entry.name.startswith(_PREFIX) and _is_stale(entry):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_stale(entry: os.DirEntry) -> bool:
    """Return whether a folder belongs to this user and to no process."""
    with contextlib.suppress(OSError):  # The file is missing in a folder that is being created or removed.
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            return False
        held = os.open(os.path.join(entry.path, _IN_USE), os.O_RDWR)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        finally:
            os.close(held)
    return False
