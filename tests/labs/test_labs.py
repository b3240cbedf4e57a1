"""An unsolved lab runs to its end, fails every check, and says what to do."""

import os

import nbformat
import pytest
from nbclient import NotebookClient

from instructor import build, contents
from shared.deadlines import scaled
from shared.ranks import reader

pytestmark = pytest.mark.exhaustive

CHAPTERS = build.chapters()


@pytest.mark.parametrize("chapter", CHAPTERS, ids=[chapter.name for chapter in CHAPTERS])
def test_an_unsolved_lab_fails_every_check_with_a_helpful_message(chapter):
    path = build.ROOT / contents.notebook("labs", chapter.name)
    lab = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(path.parent)}}
    deadline_s = int(scaled(120))
    client = NotebookClient(lab, timeout=deadline_s, startup_timeout=deadline_s, allow_errors=True, resources=resources)
    client.execute(env={**os.environ, reader.EXECUTOR: "1"})
    checks = [cell for cell in lab.cells if "check" in cell.metadata.get("tags", [])]
    assert checks
    for cell in checks:
        text = str(cell.outputs)
        errors = [output for output in cell.outputs if output.output_type == "error"]
        assert [error.ename for error in errors] == ["CheckFailed"], f"{cell.source}\n{text}"
        assert "it is not written yet" in text, f"{cell.source}\n{text}"
        assert "not written yet" in errors[0].evalue or "not there yet" in errors[0].evalue  # if some checks pass
        assert not any("framework.py" in line for line in errors[0].traceback)
