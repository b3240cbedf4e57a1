"""What pytest needs to know about the notebooks, also if somebody runs nbval on a single one."""

import os

COVER = {"text/plain": "Predict first, then run this cell."}  # see instructor/folding.py


def pytest_configure(config):
    """Tell the kernels that a program executes their notebooks (see shared/ranks/reader.py)."""
    if getattr(config.option, "nbval", False) or getattr(config.option, "nbval_lax", False):
        os.environ["COURSE_EXECUTOR"] = "1"


def pytest_collection_modifyitems(items):
    """Leave out the sentence that stands before folded answers: a cell that runs does not print it.

    A built notebook has no numbers beside its cells. To nbval, that would mean that they were not executed.
    """
    for item in items:
        cell = getattr(item, "cell", None)
        if cell is not None and cell.get("outputs"):
            cell.outputs = [output for output in cell.outputs if output.get("data") != COVER]
            cell.execution_count = cell.execution_count or 1
