"""JupyterLab's default settings for this course, its kernel, and the setup of a Colab runtime."""

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
