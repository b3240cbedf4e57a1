"""What a check prints besides its verdicts: a few lines of what the student's code printed, and what is missing."""

import contextlib
import io

import pytest

from shared import ranks
from shared.checks.engine.failures import Unusable, Wrong
from shared.checks.engine.framework import MOST_LINES, CheckFailed, Exercise, Prints
from shared.ranks import magic

pytestmark = pytest.mark.slow


def call(piece):
    return piece()


def pass_(attempt) -> None:
    attempt.run(call)


def fail(attempt) -> None:
    attempt.run(call)
    raise Wrong("it is wrong")


@pytest.fixture
def two_ranks(ranks_end_with_the_module):
    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(2)


def test_prints_of_the_failed_check_are_shown_but_no_warnings(two_ranks, capsys):
    exercise = Exercise("9.9", "talks")
    exercise.check("first", world_sizes=(1, 2))(pass_)
    exercise.check("second", world_sizes=(2,))(fail)
    magic.cell("", "import warnings\ndef talks():\n    print('size', world_size)\n    warnings.warn('deprecated')")
    with pytest.raises(CheckFailed):
        exercise()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Your code printed this in the check “second”, on 2 ranks:",
        "ranks 0, 1 │ size 2",
    ]


def test_prints_of_passed_checks_are_shown_once(two_ranks, capsys):
    exercise = Exercise("9.9", "talks")
    exercise.check("first", world_sizes=(1, 2))(pass_)
    magic.cell("", "def talks(): print('size', world_size)")
    exercise()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Your code printed this in the check “first”, on 1 rank:",
        "rank 0 │ size 1",
    ]


def test_a_check_says_that_a_piece_is_not_defined_on_the_ranks(two_ranks):
    exercise = Exercise("9.9", "not_yet_run")
    exercise.check("first", world_sizes=(1, 2))(pass_)
    with pytest.raises(Unusable, match="not_yet_run is not defined on the ranks: run the %%ranks cell"):
        exercise()


def test_many_lines_are_cut(capsys):
    prints = Prints()
    prints.show()
    prints.add("values", 2, {0: "line\n" * 30, 1: "line\n" * 30}, failed=True)
    prints.show()
    _title, *lines = capsys.readouterr().out.splitlines()
    assert lines == ["ranks 0, 1 │ line"] * MOST_LINES + ["ranks 0, 1 │ … 18 more lines not shown"]
