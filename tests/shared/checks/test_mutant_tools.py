"""The tools around the mutants: tables of them, the report on those that were caught, and the kill matrix."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests import matrix, mutants, mutation_results
from tests.matrix import Result, Row
from tests.mutants import BadRow
from tests.runner.results import Outcome, Results

exhaustive = pytest.mark.exhaustive

# -- a row of a table changes today's solution, or fails and names itself

HELPER = '''"""Helps."""


def clip(values, most):
    """Clip values to at most `most`."""
    return [min(value, most) for value in values]
'''
SOLUTION = '''"""A solution."""

from solutions.helper import clip


class Mean:
    """Computes means."""

    def of(self, values):
        """Return the mean."""
        total = 0
        for value in clip(values, 10):
            if value > 0:
                total += value
        return total / len(values)  # not of those above 0


def double(values):
    total = 0
    return [2 * value for value in values]
'''
AFTER = "        total += value\nreturn total"  # the lines that follow `if value > 0:`
ROW = '[[mutant]]\nname = "wrong"\nwhy = "Is wrong."\ncaught_by = "Mean · values"\n'


@pytest.fixture
def code_of(tmp_path, monkeypatch):
    """Return a function that returns the code of a table's only row."""
    monkeypatch.setattr(mutants, "module_of", lambda chapter: "toy")
    for name, text in {"toy": SOLUTION, "helper": HELPER}.items():
        (tmp_path / f"{name}.py").write_text(text)

    def code(row: str) -> str:
        (tmp_path / "99_toy.toml").write_text(ROW + row)
        (mutant,) = mutants.of_chapter("99_toy", tmp_path)
        return replace(mutant, solutions=tmp_path).code()

    return code


@exhaustive
@pytest.mark.parametrize(
    ("row", "mean"),
    [
        ('in = "Mean.of"\nreplace = "len(values)"\nby = "2"', 3),
        ('in = "Mean.of"\nby = "return 7"', 7),
        ('in = "Mean.of"\nreplace = """\nif value > 0:\n    total += value\n"""\nby = "total += value"', 1),
        ('in = "Mean.of"\nreplace = "total += value"\nby = "if value > 1:\\n    total += value"', 5 / 3),
        (f'in = "Mean.of"\nreplace = """\n{AFTER}"""\nby = """\n{AFTER.replace("value", "1")}"""', 2 / 3),
        ('in = "Mean"\nreplace = "total = 0"\nby = "total = 3"', 3),
        ('replace = "not of those"\nby = "or"\n[[mutant.also]]\nin = "double"\nby = "return []"', 2),
    ],
    ids=["text", "body", "several lines", "deeper", "less deep", "in a class", "also elsewhere"],
)
def test_a_row_changes_the_solution(code_of, row, mean):
    namespace = {"clip": lambda values, most: values}
    exec(code_of(row).replace("from solutions.helper import clip", ""), namespace)
    assert namespace["Mean"]().of([5, -3, 1]) == mean


@exhaustive
def test_a_row_keeps_the_docstring_and_the_rest(code_of):
    code = code_of('in = "Mean.of"\nby = "return 7"')
    assert '"""Return the mean."""\n        return 7\n' in code and code.endswith(
        SOLUTION[SOLUTION.index("\n\n\ndef d") :]
    )


@exhaustive
def test_a_row_may_change_the_module_of_a_helper(code_of):
    code, namespace = code_of('in = "helper.clip"\nreplace = "min("\nby = "max("'), {}
    exec(code, namespace)
    assert namespace["Mean"]().of([1, 20]) == 15 and "from solutions" not in code


@exhaustive
def test_two_modules_that_define_the_same_name_are_rejected(code_of, tmp_path):
    (tmp_path / "helper.py").write_text(HELPER + "\n\ndef double(): ...\n")
    with pytest.raises(BadRow, match=r"^99_toy\.toml, wrong: double is defined in two of the modules toy, helper$"):
        code_of('in = "helper.clip"\nby = "return []"')


@exhaustive
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('in = "Mean.of"\nreplace = "sum("\nby = ""', r"this text is 0 times in Mean\.of, expected once:\nsum\("),
        ('replace = "total = 0"\nby = ""', r"this text is 2 times in the module, expected once"),
        ('in = "Mean.of"\nreplace = """\ntotal = 0\nfor value in values:\n"""\nby = ""', r"this text is 0 times"),
        ('in = "Mean.all"\nby = "pass"', r"the solution has no Mean\.all$"),
        ('in = "Median"\nby = "pass"', r"the solution has no Median$"),
        ('in = "Mean.of"\nreplace = "total / len"\nby = "total len"', r"invalid syntax"),
        ('by = "pass"', r"a row without `replace` needs `in`"),
        ('in = "double"\nreplace = "total"\nby = "x"\n[[mutant.also]]\nreplace = "total"\nby = "y"', r"this text is 0"),
    ],
)
def test_a_row_that_cannot_be_applied_names_itself(code_of, row, message):
    with pytest.raises(BadRow, match=rf"^99_toy\.toml, wrong: {message}"):
        code_of(row)


@exhaustive
@pytest.mark.parametrize(
    ("table", "message"),
    [
        (ROW, r"99_toy\.toml, wrong: no by"),
        (ROW + 'by = ""\nwith = ""', r"99_toy\.toml, wrong: unknown keys with"),
        (ROW + 'by = ""\n[[mutant.also]]\nby = ""\nwith = ""', r"99_toy\.toml, wrong: unknown keys with"),
        (2 * (ROW + 'by = ""\n'), r"99_toy: two mutants are called wrong"),
    ],
)
def test_a_malformed_table_names_the_row(tmp_path, table, message):
    (tmp_path / "99_toy.toml").write_text(table)
    with pytest.raises(BadRow, match=rf"^{message}$"):
        mutants.of_chapter("99_toy", tmp_path)


@exhaustive
def test_rows_and_functions_are_read(tmp_path):
    docstring = '"""Is wrong.\n\n{0}caught by: Mean · values\n{0}"""\n\n'
    (tmp_path / "99_toy.toml").write_text(ROW + 'in = "double"\nby = "pass"')
    body = "    calls = [math.pi]\n\n    def double(values):\n        return values\n"
    module = f'"""Some."""\n\nimport math\nimport unused\n\n\ndef function():\n    {docstring.format("    ")}{body}'
    (tmp_path / "99_toy.py").write_text(module)
    found = mutants.of_chapter("99_toy", tmp_path)
    assert mutants.names(tmp_path) == ["99_toy"]
    assert [(each.name, each.why, each.exercise, each.check) for each in found] == [
        (name, "Is wrong.", "Mean", "values") for name in ("wrong", "function")
    ]
    assert found[1].code() == "import math\n\ncalls = [math.pi]\n\ndef double(values):\n    return values\n"
    assert found[1].write(tmp_path).read_text() == found[1].code()


# -- the report counts caught mutants and passed variants, and lists failed and missing ones

CHAPTER = "02_manual_ddp"
MUTANT = "tests/shared/checks/test_mutants.py::test_the_named_check_catches_the_mutant"
VARIANT = "tests/shared/checks/test_mutants.py::test_a_right_solution_written_differently_passes"
VALUES, WIRE = {"caught_by": "mean · values"}, {"caught_by": "mean · wire"}


def row_named(name: str) -> str:
    return ROW.replace("wrong", name) + 'in = "mean"\nby = "pass"\n'


def outcomes() -> list[Outcome]:
    """Return two mutants that were caught, one that was not, a variant that passed and one that was skipped."""
    return [
        Outcome(f"{MUTANT}[{CHAPTER}-one]", "passed", 1.5, properties=VALUES),
        Outcome(f"{MUTANT}[{CHAPTER}-other]", "passed", 0.5, properties=VALUES),
        Outcome(f"{MUTANT}[{CHAPTER}-third]", "failed", 1.0, properties=WIRE),
        Outcome(f"{VARIANT}[{CHAPTER}-way]", "passed", 4.0),
        Outcome(f"{VARIANT}[03_gradient_bucketing-way]", "skipped", 1.0),
        Outcome(f"tests/shared/checks/test_mutants.py::test_there_are_enough_of_both[{CHAPTER}]"),
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
    rows = "".join(row_named(name) for name in ("one", "other", "third"))
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
    (tests_folder / "mutants" / "99_no_chapter.toml").write_text(row_named("stray"))
    lost, stray = f"was not tried: variants/{CHAPTER}/lost", "was not tried: mutants/99_no_chapter/stray"
    assert mutation_results.problems(read(*all_passed()), (CHAPTER,), tests_folder) == [stray, lost]


def test_mutants_of_other_chapters_need_not_be_tried(tests_folder):
    (tests_folder.parent / "source" / "10_new").mkdir()
    (tests_folder.parent / "source" / "10_new" / "lab.py").touch()
    (tests_folder / "mutants" / "10_new.toml").write_text(row_named("stray"))
    assert mutation_results.problems(read(*all_passed()), (CHAPTER,), tests_folder) == []


def test_a_chapter_without_mutants_or_variants_is_a_problem(tests_folder):
    expected = ["10_new has no mutants", "10_new has no variants"]
    assert mutation_results.problems(read(*all_passed()), (CHAPTER, "10_new"), tests_folder) == expected


def test_a_mutant_without_the_check_that_caught_it_is_a_problem(tests_folder):
    first, *others = all_passed()
    found = read(replace(first, properties={}), *others)
    expected = [f"{CHAPTER}: a mutant does not say which check caught it"]
    assert mutation_results.problems(found, (CHAPTER,), tests_folder) == expected


# -- the kill matrix keeps what it has judged, and lists what no check tells apart and what has changed

PASSED, FAILED = Result("passed"), Result("failed", "Hint: why?")


def row(**results: Result) -> Row:
    return Row("1", results)


@exhaustive
def test_a_matrix_is_read_as_it_was_written(tmp_path):
    rows = {"mutants/05_scaling/one": row(values=FAILED), "variants/05_scaling/way": row(values=PASSED)}
    matrix.write(rows, tmp_path / "build" / "matrix.json")
    assert matrix.read(tmp_path / "build" / "matrix.json") == rows
    assert matrix.read(tmp_path / "none.json") == {}


@exhaustive
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


@exhaustive
def test_differences_are_verdicts_hints_and_names():
    old = {
        "mutants/05_scaling/one": row(values=FAILED, noise=PASSED),
        "mutants/05_scaling/gone": row(values=FAILED),
    }
    new = {"mutants/05_scaling/one": row(values=Result("failed", "Hint: where?"), noise=FAILED)}
    lines = matrix.differences(old, new)
    assert [line.split(":")[0] for line in lines] == [
        "mutants/05_scaling/gone",
        "mutants/05_scaling/one, noise",
        "mutants/05_scaling/one, values",
    ]
    assert matrix.differences(old, old) == []


@exhaustive
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


@exhaustive
def test_every_check_and_every_variant_is_a_job_unless_only_named_checks_are():
    every, named = (matrix.jobs_of("00_ranks", named_only) for named_only in (False, True))
    assert {job.check for job in every} == {""} and any(job.name.startswith("variants/") for job in every)
    assert [job.check for job in named] == [mutant.check for mutant in mutants.of_chapter("00_ranks")]
