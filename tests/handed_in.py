"""Submissions for tests: our own solution of a lab, with a student's changes."""

import os
import zipfile
from pathlib import Path

import nbformat
import psutil
import pytest

from instructor import build
from instructor.grade import reader, sandbox, submissions
from instructor.grade.submissions import Submission

CHAPTERS = {chapter.name: chapter for chapter in build.chapters()}


def need_sandbox() -> None:
    """Skip the test if there is no sandbox. In CI, or with GRADE_SANDBOX=required, fail instead."""
    try:
        sandbox.require()
    except sandbox.NoSandbox as error:
        required = os.environ.get("CI") or os.environ.get("GRADE_SANDBOX") == "required"
        (pytest.fail if required else pytest.skip)(str(error))


def left_over() -> list[psutil.Process]:
    """Return the processes of a sandbox's users that are still alive."""
    users = range(sandbox.FIRST_USER, sandbox.FIRST_USER + sandbox.USERS)
    processes = list(psutil.process_iter(["uids"]))
    return [each for each in processes if each.info["uids"] and each.info["uids"].real in users]


def hand_in(folder: Path, student: str, lab: str, change=lambda notebook: None) -> Submission:
    """Write <folder>/<student>/<lab>/<lab>.ipynb: our solution after change(notebook)."""
    notebook = build.solution_of(CHAPTERS[lab])
    change(notebook)
    path = folder / student / lab / f"{lab}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, path)
    return Submission(student, lab, path)


def packed(folder: Path, files: dict[str, str]) -> Path:
    """Write a zip file with these names and texts, as a platform offers it for download."""
    path = folder / "download.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def cell_of(notebook, name: str):
    return next(cell for cell in notebook.cells if cell.metadata.get("nbgrader", {}).get("grade_id") == name)


def writes(**sources: str):
    """Return a change that replaces the source of exercises. Write _ for each - in an exercise's name."""

    def change(notebook):
        for name, source in sources.items():
            cell_of(notebook, name.replace("_", "-")).source = source

    return change


def cells_of(submission: Submission) -> list[dict]:
    """Read a notebook's code cells without the sandbox."""
    with open(submissions.opened(submission), "rb") as file:
        return reader.code_cells_in(file.read())


def pieces_of(submission: Submission) -> list[dict]:
    """Return the pieces of a notebook, read without the sandbox."""
    return submissions.pieces_of(cells_of(submission), CHAPTERS[submission.lab])
