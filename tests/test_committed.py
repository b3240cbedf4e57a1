"""The site shows the committed notebooks, and not what somebody has run or written in this copy of the course."""

import subprocess

import pytest

from instructor.site import notebooks

OURS, MINE = '{"cells": []}\n', '{"cells": ["my own code"]}\n'
NAME = "labs/00_ranks_lab.ipynb"


@pytest.fixture
def course(tmp_path, monkeypatch):
    (tmp_path / "labs").mkdir()
    (tmp_path / NAME).write_text(OURS)
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    return tmp_path


def commit(folder) -> None:
    author = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
    for arguments in (("init", "-q"), ("add", "-A"), (*author, "commit", "-qm", "all")):
        subprocess.run(["git", *arguments], cwd=folder, check=True)


def test_a_page_shows_the_committed_notebook(course):
    commit(course)
    assert notebooks.changed(["labs/*.ipynb"]) == []
    (course / NAME).write_text(MINE)
    assert notebooks.committed_text(NAME) == OURS
    assert notebooks.changed(["labs/*.ipynb"]) == [NAME]


def test_a_new_notebook_is_shown_before_it_is_committed(course):
    commit(course)
    (course / "labs" / "new.ipynb").write_text(OURS)
    assert notebooks.committed_text("labs/new.ipynb") == OURS


def test_without_git_a_page_shows_the_file(course, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert notebooks.committed_text(NAME) == OURS and notebooks.changed([NAME]) == []
