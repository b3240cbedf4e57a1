"""JupyterLab's default settings for this course, its kernel, and the setup of a Colab runtime.

A kernel of `make lab` loads this package as an extension. `%%ranks` is then registered, and NameErrors are explained,
so that a cell run out of order says what to do. The kernel describes its language in the same words in every
environment, because JupyterLab writes them into each notebook that it opens.
"""

# JupyterLab writes both into the metadata of every notebook that it opens. The built notebooks have them already, so
# opening one changes nothing in git.
KERNELSPEC = {"display_name": "Python 3", "language": "python", "name": "python3"}
LANGUAGE_INFO = {
    "codemirror_mode": {"name": "ipython", "version": 3},
    "file_extension": ".py",
    "mimetype": "text/x-python",
    "name": "python",
    "nbconvert_exporter": "python",
    "pygments_lexer": "ipython3",
    "version": "3",  # The kernel would name the exact version, which differs from student to student.
}


def load_ipython_extension(shell) -> None:
    """Prepare the kernel. IPython calls this, because the kernel in shared/jupyter/kernels names this package."""
    from shared.ranks import magic  # A build needs only the names above.

    shell.register_magic_function(magic.cell, "cell", "ranks")
    shell.kernel.language_info = LANGUAGE_INFO
    magic.explain_in_notebook()
