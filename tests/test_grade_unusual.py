"""Honest but unusual: what runs in a notebook gets its points, however it was saved and whatever else stands there."""

import copy
import json

import pytest

from shared.grade import submissions
from tests.handed_in import CHAPTERS, hand_in

LAB = "00_ranks"


def saved_otherwise(folder, change) -> list[dict]:
    """→ the pieces of our own solution, whose file was changed so"""
    submission = hand_in(folder, "anna", LAB)
    notebook = json.loads(submission.path.read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    change(notebook, code)
    submission.path.write_text(json.dumps(notebook), encoding="utf-8-sig")
    return submissions.pieces_of(submission, CHAPTERS[LAB])


SAVED = {
    "with a mark before the text": lambda notebook, code: None,
    "with a field that the format has not": lambda notebook, code: code[0].update(colab="x"),
    "without outputs": lambda notebook, code: [cell.pop("outputs") for cell in code],
    "without counts": lambda notebook, code: [cell.pop("execution_count") for cell in code],
    "with a broken output": lambda notebook, code: code[0]["outputs"].append({"output_type": "stream"}),
    "by an older editor": lambda notebook, code: (
        notebook.update(nbformat_minor=2),
        [cell.pop("id") for cell in notebook["cells"]],
    ),
    "with another first line": lambda notebook, code: [
        cell.update(source=["%%ranks --timeout 20\r\n", "%%time\n", *cell["source"][1:]])
        for cell in code
        if cell["source"][0].startswith("%%ranks")
    ],
}


@pytest.mark.parametrize("how", SAVED)
def test_a_notebook_counts_however_it_was_saved(tmp_path, how):
    plain = submissions.pieces_of(hand_in(tmp_path / "1", "anna", LAB), CHAPTERS[LAB])
    assert saved_otherwise(tmp_path / "2", SAVED[how]) == plain


def test_marks_that_are_no_marks_cost_their_own_cell(tmp_path):
    for grading in ([1], "x", {"solution": True, "grade_id": [1]}):

        def change(notebook, code, grading=grading):
            first = next(cell for cell in code if cell["metadata"].get("nbgrader", {}).get("solution"))
            first["metadata"]["nbgrader"] = copy.deepcopy(grading)

        assert len(saved_otherwise(tmp_path, change)) == 5


def test_a_notebook_of_countless_cells_does_not_hold_up_the_others(tmp_path):
    def change(notebook, code):
        notebook["cells"] += [{"cell_type": "raw", "metadata": {}, "source": "", "id": "a"}] * 100_000

    with pytest.raises(submissions.Unreadable, match="more than 2000 cells"):
        saved_otherwise(tmp_path, change)
