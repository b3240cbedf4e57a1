"""Tell whether somebody reads this notebook while it runs, and which file it is.

Progress, points, live lines and widgets are for readers, whatever they read in: JupyterLab, the classic notebook, VS
Code or Colab. A program that executes notebooks, such as a build or CI, sets the environment variable COURSE_EXECUTOR,
so that what a notebook prints is the same in every folder.
"""

import os
from pathlib import Path

from IPython import get_ipython
from IPython.display import clear_output, display

from shared.tables import render

EXECUTOR = "COURSE_EXECUTOR"


def present() -> bool:
    """Return whether this process is a notebook's kernel, and no program that executes notebooks started it."""
    return hasattr(get_ipython(), "kernel") and not os.environ.get(EXECUTOR)


def path() -> Path | None:
    """Return this kernel's notebook, as Jupyter's server or VS Code names it, or None if neither does."""
    shell = get_ipython()
    in_vs_code = shell.user_ns.get("__vsc_ipynb_file__", "") if shell is not None else ""
    named = os.environ.get("JPY_SESSION_NAME", "") or in_vs_code
    return Path(named) if named else None


def folder() -> Path:
    """Return the folder of this kernel's notebook. Where nobody names the notebook, kernels run in its folder."""
    named = path()
    return (named.parent if named else Path.cwd()).resolve()


def show_live(text: str) -> None:
    """Replace this cell's output by a line about what is running."""
    clear_output(wait=True)
    display({"text/plain": text, "text/html": render("shared.ranks", "live_line.html", text=text)}, raw=True)
