"""A row of a mutants' table changes today's solution, or fails and names itself."""

from dataclasses import replace

import pytest

from tests import mutants
from tests.mutants import BadRow

pytestmark = pytest.mark.exhaustive

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


def test_a_row_keeps_the_docstring_and_the_rest(code_of):
    code = code_of('in = "Mean.of"\nby = "return 7"')
    assert '"""Return the mean."""\n        return 7\n' in code and code.endswith(
        SOLUTION[SOLUTION.index("\n\n\ndef d") :]
    )


def test_a_row_may_change_the_module_of_a_helper(code_of):
    code, namespace = code_of('in = "helper.clip"\nreplace = "min("\nby = "max("'), {}
    exec(code, namespace)
    assert namespace["Mean"]().of([1, 20]) == 15 and "from solutions" not in code


def test_two_modules_that_define_the_same_name_are_rejected(code_of, tmp_path):
    (tmp_path / "helper.py").write_text(HELPER + "\n\ndef double(): ...\n")
    with pytest.raises(BadRow, match=r"^99_toy\.toml, wrong: double is defined in two of the modules toy, helper$"):
        code_of('in = "helper.clip"\nby = "return []"')


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


@pytest.mark.parametrize("chapter", mutants.names())
def test_every_mutant_is_python(chapter):
    for mutant in mutants.of_chapter(chapter):
        compile(mutant.code(), mutant.name, "exec", dont_inherit=True)
