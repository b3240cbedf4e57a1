"""The mutation report counts what a run found, and says what is not as it should be, or was not tried."""

from pathlib import Path

import pytest

from tests import mutation_results

CASES = """<testsuites><testsuite>
<testcase name="test_the_named_check_catches_the_mutant[02_manual_ddp-one]" time="1.5">
<properties><property name="caught_by" value="mean · values"/></properties></testcase>
<testcase name="test_the_named_check_catches_the_mutant[02_manual_ddp-other]" time="0.5">
<properties><property name="caught_by" value="mean · values"/></properties></testcase>
<testcase name="test_the_named_check_catches_the_mutant[02_manual_ddp-third]" time="1">
<properties><property name="caught_by" value="mean · wire"/></properties><failure message="passes"/></testcase>
<testcase name="test_a_right_solution_written_differently_passes[02_manual_ddp-way]" time="4"/>
<testcase name="test_a_right_solution_written_differently_passes[03_gradient_bucketing-way]" time="1">
<skipped/></testcase>
<testcase name="test_there_are_enough_of_both[02_manual_ddp]" time="0"/>
</testsuite></testsuites>"""


CHAPTER = "02_manual_ddp"


def read(tmp_path, cases: str = CASES) -> dict[str, mutation_results.Report]:
    (tmp_path / "report.xml").write_text(cases)
    return mutation_results.read(tmp_path / "report.xml")


def test_mutants_are_counted_by_the_check_that_caught_them(tmp_path):
    found = read(tmp_path)[CHAPTER]
    assert (found.mutants, found.caught, found.by_check) == (3, 2, {"mean · values": 2})
    assert (found.variants, found.passed, found.seconds) == (1, 1, 7.0)


def test_the_tables_say_so(tmp_path):
    found = read(tmp_path)
    rows = str(mutation_results.by_chapter(found)).splitlines()
    assert rows[1].split() == [CHAPTER, "2", "/", "3", "1", "/", "1", "7"]
    assert rows[2].split() == ["03_gradient_bucketing", "0", "/", "0", "0", "/", "1", "1"]
    assert str(mutation_results.by_check(found)).splitlines()[1].split()[-1] == "2"


def test_a_report_cut_short_tells_of_nothing(tmp_path):
    assert read(tmp_path, CASES[:400]) == {}
    assert mutation_results.read(tmp_path / "none.xml") == {}


@pytest.fixture
def tests_folder(tmp_path) -> Path:
    """A project with the files that CASES tell of, but for the chapter that has no mutant."""
    for kind, stems in {"mutants": ("one", "other", "third"), "variants": ("way",)}.items():
        (tmp_path / "tests" / kind / CHAPTER).mkdir(parents=True)
        for stem in stems:
            (tmp_path / "tests" / kind / CHAPTER / f"{stem}.py").touch()
    (tmp_path / "source" / CHAPTER).mkdir(parents=True)
    (tmp_path / "source" / CHAPTER / "lab.py").touch()
    return tmp_path / "tests"


ALL_WELL = CASES.replace('<failure message="passes"/>', "").replace("<skipped/>", "")


def test_all_well(tmp_path, tests_folder):
    assert mutation_results.problems(read(tmp_path, ALL_WELL), tests=tests_folder) == []


def test_what_passed_or_did_not_run_is_a_problem(tmp_path, tests_folder):
    assert mutation_results.problems(read(tmp_path), tests=tests_folder) == [
        f"not as it should be: {CHAPTER}-third",
        "not as it should be: 03_gradient_bucketing-way",
    ]


def test_a_file_that_was_not_tried_is_a_problem_wherever_it_lies(tmp_path, tests_folder):
    (tests_folder / "variants" / CHAPTER / "lost.py").touch()
    (tests_folder / "mutants" / "no_chapter").mkdir()
    (tests_folder / "mutants" / "no_chapter" / "stray.py").touch()
    found = read(tmp_path, ALL_WELL)
    lost, stray = f"was not tried: variants/{CHAPTER}/lost.py", "was not tried: mutants/no_chapter/stray.py"
    assert mutation_results.problems(found, tests=tests_folder) == [stray, lost]
    assert mutation_results.problems(found, [CHAPTER], tests_folder) == [lost]


def test_a_chapter_without_any_is_a_problem(tmp_path, tests_folder):
    (tests_folder.parent / "source" / "10_new").mkdir()
    (tests_folder.parent / "source" / "10_new" / "lab.py").touch()
    expected = ["10_new has no mutants", "10_new has no variants"]
    assert mutation_results.problems(read(tmp_path, ALL_WELL), tests=tests_folder) == expected


def test_a_mutant_that_nobody_is_said_to_have_caught_is_a_problem(tmp_path, tests_folder):
    found = read(tmp_path, ALL_WELL.replace('name="caught_by"', 'name="else"', 1))
    assert mutation_results.problems(found, tests=tests_folder) == [f"{CHAPTER}: a mutant does not say who caught it"]
