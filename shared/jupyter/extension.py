"""Prepares a kernel of `make lab` when it starts.

`%%ranks` is registered, and NameErrors are explained, so that a cell run out of order says what to do. The kernel
describes its language in the same words in every environment, because JupyterLab writes them into each notebook that it
opens.
"""

from shared.jupyter import LANGUAGE_INFO
from shared.ranks import magic


def load_ipython_extension(shell) -> None:
    """Prepare the kernel. IPython calls this, because the kernel in shared/jupyter/kernels names this module."""
    shell.register_magic_function(magic.cell, "cell", "ranks")
    shell.kernel.language_info = LANGUAGE_INFO
    magic.explain_in_notebook()
