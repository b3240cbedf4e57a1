"""Registers `%%ranks` when a kernel starts, so that a cell run out of order says what to do."""

from shared.ranks import magic


def load_ipython_extension(shell) -> None:
    """Register the magic. IPython calls this, because the kernel in shared/jupyter/kernels names this module."""
    shell.register_magic_function(magic.cell, "cell", "ranks")
