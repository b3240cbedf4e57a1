"""The mutation report counts caught mutants and passed variants, and lists failed and missing ones."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests import mutation_results
from tests.runner.results import Outcome, Results

CHAPTER = "02_manual_ddp"
MUTANT = "tests/test_mutants.py::test_the_named_check_catches_the_mutant"
VARIANT = "tests/test_mutants.py::test_a_right_solution_written_differently_passes"
ROW = """
[[mutant]]
name = "stray"
why = "Belongs to no chapter."
caught_by = "mean · values"
in = "mean"
by = "pass"
"""
VALUES, WIRE = {"caught_by": "mean · values"}, {"caught_by": "mean · wire"}


def outcomes() -> list[Outcome]:
    """Return two mutants that were caught, one that was not, a variant that passed and one that was skipped."""
    return [
        Outcome(f"{MUTANT}[{CHAPTER}-one]", "passed", 1.5, properties=VALUES),
        Outcome(f"{MUTANT}[{CHAPTER}-other]", "passed", 0.5, properties=VALUES),
        Outcome(f"{MUTANT}[{CHAPTER}-third]", "failed", 1.0, properties=WIRE),
        Outcome(f"{VARIANT}[{CHAPTER}-way]", "passed", 4.0),
        Outcome(f"{VARIANT}[03_gradient_bucketing-way]", "skipped", 1.0),
        Outcome(f"tests/test_mutants.py::test_there_are_enough_of_both[{CHAPTER}]"),
    ]


def read(*outcomes: Outcome) -> dict[str, mutation_results.Report]:
    return mutation_results.read(Results(tests={outcome.name: outcome for outcome in outcomes}))


def test_mutants_are_counted_by_the_check_that_caught_them():
    found = read(*outcomes())[CHAPTER]
    assert (found.mutants, found.caught, found.by_check) == (3, 2, {"mean · values": 2})
    assert (found.variants, found.passed, found.seconds) == (1, 1, 7.0)


def test_the_tables_show_the_counts():
    found = read(*outcomes())
    rows = str(mutation_results.by_chapter(found)).splitlines()
    assert rows[1].split() == [CHAPTER, "2", "/", "3", "1", "/", "1", "7"]
    assert rows[2].split() == ["03_gradient_bucketing", "0", "/", "0", "0", "/", "1", "1"]
    assert str(mutation_results.by_check(found)).splitlines()[1].split()[-1] == "2"


def test_no_results_give_an_empty_report():
    assert read() == {}


@pytest.fixture
def tests_folder(tmp_path) -> Path:
    """Create a project with the files in `outcomes`, except for the chapter that has no mutant."""
    (tmp_path / "tests" / "mutants").mkdir(parents=True)
    rows = "".join(ROW.replace("stray", name) for name in ("one", "other", "third"))
    (tmp_path / "tests" / "mutants" / f"{CHAPTER}.toml").write_text(rows)
    (tmp_path / "tests" / "variants" / CHAPTER).mkdir(parents=True)
    (tmp_path / "tests" / "variants" / CHAPTER / "way.py").touch()
    (tmp_path / "source" / CHAPTER).mkdir(parents=True)
    (tmp_path / "source" / CHAPTER / "lab.py").touch()
    return tmp_path / "tests"


def all_passed() -> list[Outcome]:
    return [replace(outcome, verdict="passed") for outcome in outcomes()]


def test_there_is_no_problem_if_everything_passed(tests_folder):
    assert mutation_results.problems(read(*all_passed()), (CHAPTER,), tests_folder) == []


def test_failed_and_skipped_ones_are_problems(tests_folder):
    assert mutation_results.problems(read(*outcomes()), (CHAPTER,), tests_folder) == [
        f"failed: {CHAPTER}-third",
        "failed: 03_gradient_bucketing-way",
    ]


def test_one_that_was_not_tried_is_a_problem_in_any_chapter(tests_folder):
    (tests_folder / "variants" / CHAPTER / "lost.py").touch()
    (tests_folder / "mutants" / "99_no_chapter.toml").write_text(ROW)
    lost, stray = f"was not tried: variants/{CHAPTER}/lost", "was not tried: mutants/99_no_chapter/stray"
    assert mutation_results.problems(read(*all_passed()), (CHAPTER,), tests_folder) == [stray, lost]


def test_mutants_of_other_chapters_need_not_be_tried(tests_folder):
    (tests_folder.parent / "source" / "10_new").mkdir()
    (tests_folder.parent / "source" / "10_new" / "lab.py").touch()
    (tests_folder / "mutants" / "10_new.toml").write_text(ROW)
    assert mutation_results.problems(read(*all_passed()), (CHAPTER,), tests_folder) == []


def test_a_chapter_without_mutants_or_variants_is_a_problem(tests_folder):
    expected = ["10_new has no mutants", "10_new has no variants"]
    assert mutation_results.problems(read(*all_passed()), (CHAPTER, "10_new"), tests_folder) == expected


def test_a_mutant_without_the_check_that_caught_it_is_a_problem(tests_folder):
    first, *others = all_passed()
    found = read(replace(first, properties={}), *others)
    expected = [f"{CHAPTER}: a mutant does not say which check caught it"]
    assert mutation_results.problems(found, (CHAPTER,), tests_folder) == expected
