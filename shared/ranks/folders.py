"""The folder of the notebook, and the folder with the logs and files of a set of ranks.

When this module is imported, the notebook's folder moves to the end of Python's path (see `search_last`).
"""

import contextlib
import fcntl
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from shared.ranks.errors import RanksError

COURSE_ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "numpy", "sympy", "psutil", "IPython", "ipykernel", "zmq", "tornado", "traitlets")
_PREFIX = "ranks-"
_IN_USE = "in-use"  # A file that all processes of the set hold a lock on, so that nobody takes its folder for stale.


def current() -> str:
    """Return the folder of the notebook, or "" if it has been removed."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return ""


def python_path() -> str:
    """Return a PYTHONPATH with which ranks find `shared` and `solutions` from any directory.

    The current folder is left out, because a student may keep a random.py there. Ranks find its other files, because
    they search it last (see rankside.initialize_rank).
    """
    inherited = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    here = current()
    return os.pathsep.join([str(COURSE_ROOT), *(entry for entry in inherited if entry != here)])


def search_last() -> None:
    """Let this process import from the folders of the notebook and of the script only what is nowhere else.

    A student may keep a torch.py or a folder named numpy there, which would be imported instead of the package.

    Raises:
        RanksError: If such a file was imported already.
    """
    own = _own_folders()
    sys.path.sort(key=lambda entry: os.path.abspath(entry) in own)
    for name in (*_PACKAGES, *sys.stdlib_module_names):
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        folder = os.path.dirname(file.removesuffix(os.path.join(name, "__init__.py")) or os.curdir)
        if file and os.path.abspath(folder) in own:
            raise RanksError(f"{file} was imported in place of the module {name}: rename it, then restart the kernel.")


def check_installed(*packages: str) -> None:
    """Check that this process's Python has these packages. It may be the kernel of another environment.

    Raises:
        RanksError: If one is missing.
    """
    missing = [name for name in packages if name not in sys.modules and importlib.util.find_spec(name) is None]
    if missing:
        raise RanksError(
            f"The Python of this kernel, {sys.executable}, does not have {' and '.join(missing)}: choose the course's "
            "own kernel, which `make lab` starts."
        )


def _own_folders() -> set[str]:
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folders = {current(), os.path.dirname(os.path.abspath(script)) if script else ""}
    return folders - {"", str(COURSE_ROOT)}


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


search_last()
check_installed("psutil")
