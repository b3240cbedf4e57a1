"""The kill matrix keeps what it has judged, and lists what no check tells apart and what has changed."""

import pytest

from tests import matrix, mutants
from tests.matrix import Result, Row

pytestmark = pytest.mark.exhaustive

PASSED, FAILED = Result("passed"), Result("failed", "Hint: why?")


def row(**results: Result) -> Row:
    return Row("1", results)


def test_a_matrix_is_read_as_it_was_written(tmp_path):
    rows = {"mutants/05_scaling/one": row(values=FAILED), "variants/05_scaling/way": row(values=PASSED)}
    matrix.write(rows, tmp_path / "build" / "matrix.json")
    assert matrix.read(tmp_path / "build" / "matrix.json") == rows
    assert matrix.read(tmp_path / "none.json") == {}


def test_checks_that_catch_nothing_alone_and_mutants_alike_are_reported():
    rows = {
        "mutants/05_scaling/one": row(values=FAILED, noise=PASSED),
        "mutants/05_scaling/other": row(values=FAILED, noise=PASSED),
        "mutants/05_scaling/both": row(values=FAILED, noise=Result("too slow")),
        "variants/05_scaling/way": row(values=PASSED, noise=FAILED),
    }
    assert matrix.report(rows) == [
        "05_scaling: noise catches 1 mutants, none of them alone",
        "05_scaling: no check tells apart one, other",
    ]


def test_differences_are_verdicts_hints_and_names():
    old = {"mutants/05_scaling/one": row(values=FAILED, noise=PASSED), "mutants/05_scaling/gone": row(values=FAILED)}
    new = {"mutants/05_scaling/one": row(values=Result("failed", "Hint: where?"), noise=FAILED)}
    lines = matrix.differences(old, new)
    assert [line.split(":")[0] for line in lines] == [
        "mutants/05_scaling/gone",
        "mutants/05_scaling/one, noise",
        "mutants/05_scaling/one, values",
    ]
    assert matrix.differences(old, old) == []


@pytest.mark.slow
def test_only_what_is_missing_or_changed_is_judged(tmp_path, capsys):
    path, names = tmp_path / "matrix.json", ("log_the_sum", "mean_of_means")
    jobs = [job for job in matrix.jobs_of("00_ranks", named_only=True) if job.name.endswith(names)]
    matrix.fill({}, jobs, path, workers=1)
    rows = matrix.read(path)
    assert [each.caught_by for each in rows.values()] == [{"log_mean_loss · values"}, {"global_mean · values"}]
    rows[jobs[0].name].fingerprint = "of other code"
    capsys.readouterr()
    matrix.fill(rows, jobs, path, workers=1)
    assert capsys.readouterr().out.splitlines() == [f"1/1 {jobs[0].name}: {', '.join(rows[jobs[0].name].caught_by)}"]


def test_every_check_and_every_variant_is_a_job_unless_only_named_checks_are():
    every, named = (matrix.jobs_of("00_ranks", named_only) for named_only in (False, True))
    assert {job.check for job in every} == {""} and any(job.name.startswith("variants/") for job in every)
    assert [job.check for job in named] == [mutant.check for mutant in mutants.of_chapter("00_ranks")]
