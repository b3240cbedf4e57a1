"""The mutation report counts what a run found, and says what is not as it should be."""

from tests import mutation_report

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


def read(tmp_path) -> dict[str, mutation_report.Report]:
    (tmp_path / "report.xml").write_text(CASES)
    return mutation_report.read(tmp_path / "report.xml")


def test_mutants_are_counted_by_the_check_that_caught_them(tmp_path):
    found = read(tmp_path)["02_manual_ddp"]
    assert (found.mutants, found.caught, found.by_check) == (3, 2, {"mean · values": 2})
    assert (found.variants, found.passed, found.seconds) == (1, 1, 7.0)


def test_what_passed_or_did_not_run_is_a_problem(tmp_path):
    found = read(tmp_path)
    assert found["02_manual_ddp"].problems == ["02_manual_ddp-third"]
    assert found["03_gradient_bucketing"].problems == ["03_gradient_bucketing-way"]
    told = mutation_report.as_tables(found)
    assert "2 / 3" in told and "0 / 1" in told and "not as it should be: 02_manual_ddp-third" in told
