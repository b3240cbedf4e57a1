"""Explain a NameError that comes from the other side: the notebook and the ranks are different processes.

A name may exist on the ranks but not in the notebook, or the other way round. One sentence below the error says so.
"""

import re

from IPython import get_ipython

from shared.ranks.errors import CellFailed
from shared.ranks.running import find

_READY_ON_RANKS = ("rank", "world_size", "device", "dist", "torch")
_FIRST_CELLS = ("ranks", "check", "plots", "measure", "tables")
_MISSING = re.compile(r"NameError: name '(\w+)' is not defined")


def explain_in_notebook() -> None:
    """Add the sentence to every NameError of this notebook. Does nothing outside a notebook."""
    shell = get_ipython()
    if hasattr(shell, "kernel"):
        shell.set_custom_exc((NameError,), _with_sentence)


def _with_sentence(shell, kind, error, traceback, tb_offset=None) -> list[str]:
    """Return the traceback as IPython shows it, and the sentence."""
    shown = shell.InteractiveTB.structured_traceback(kind, error, traceback, tb_offset=tb_offset)
    sentence = missing_in_notebook(getattr(error, "name", None) or "")
    shell._showtraceback(kind, error, [*shown, sentence] if sentence else shown)
    return shown


def missing_in_notebook(name: str) -> str:
    """Return what to do about a name that the notebook lacks, or "" if the ranks lack it, too."""
    running = find()
    known = running.definitions if running is not None else None
    on_ranks = known is not None and (name in known.computed or any(name in cell.main_names for cell in known.cells))
    if on_ranks or name in _READY_ON_RANKS:
        others = {"dist": "it has no group here", "torch": "`import torch` works here, too"}
        bring = others.get(name, f"`ranks.pull({name!r})` brings its values here")
        return f"`{name}` exists on the ranks, and this cell runs in the notebook. Begin it with %%ranks, or: {bring}."
    if name in _FIRST_CELLS:
        return f"The first cells of the notebook define `{name}`. Run them first."
    return ""


def explain_on_ranks(failed: CellFailed) -> None:
    """Add the sentence to the error of a cell on the ranks if it lacks a name that the notebook has."""
    missing = _MISSING.search(str(failed))
    shell = get_ipython()
    if missing and shell is not None and missing[1] in shell.user_ns:
        sentence = f"`{missing[1]}` exists in the notebook, not on the ranks. Import or define it in a %%ranks cell."
        failed.args = (f"{failed.args[0]}\n{sentence}",)
