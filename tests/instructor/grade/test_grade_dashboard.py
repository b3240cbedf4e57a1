"""The dashboard counts what failed, names what was wrong most often, and finds code that is alike."""

import ast

import pytest
from rapidfuzz import fuzz

from instructor.build import ROOT
from instructor.grade import dashboard
from instructor.grade.choice import stubs_of
from instructor.grade.dashboard import essence
from instructor.grade.records import UNANSWERED, Answer, Record
from shared.checks.engine.failures import NOT_WRITTEN
from shared.checks.engine.verdicts import SAME_AS, Verdict
from tests.handed_in import CHAPTERS, hand_in, pieces_of

LONG = "\n".join(f"    total_{index} = reduce(values[{index}], group)" for index in range(10))


def record(student: str, passed: bool, code: str, reason: str = "") -> Record:
    evidence = f"rank 0 returned {len(student)}.5\n(Drawn with seed 5: 3 hidden units.)"
    verdicts = [
        Verdict("piece", "values", True, (2,)),
        Verdict("piece", "wire", passed, (2,), evidence="" if passed else evidence),
    ]
    first = Answer("0.1", "piece", 2.0 if passed else 1.0, 2.0, verdicts, cells=["piece"])
    second = Answer("0.2", "late", 0.0, 1.0, reason=reason or UNANSWERED, cells=["late"])
    return Record(student, "00_ranks", "", [first, second], code={"piece": code, "late": LONG}, seconds=3.0)


RECORDS = [
    record("anna", True, f"def piece():\n{LONG}"),
    record("ben", False, f"def piece():  # mine\n{LONG.replace(' = ', '=')}"),
    record("clara", False, "def piece(): return 1", reason="it crashed"),
]


def test_failed_checks_and_the_commonest_mistakes_are_counted():
    assert dashboard.failures(RECORDS) == [("0.1 piece", "wire", 2, 3)]
    assert dashboard.commonest(RECORDS)[0] == ("0.1 piece", "wire", "rank # returned #", 2)
    assert [dashboard.state_of(answer) for answer in RECORDS[1].answers] == ["partly passed", "unanswered"]


def test_alike_code_is_found_whatever_its_comments_and_spaces():
    (pair,) = dashboard.alike(RECORDS)
    assert (pair.students, pair.exercises) == (("anna", "ben"), ("0.1",)) and pair.percent > 99


HANDED_OUT = """def weigh(values, group):
    \"\"\"Weigh the values by their lengths, over all ranks of the group.\"\"\"
    raise NotImplementedError("your code here")
"""
ONE = """def weigh(values, group):
    \"\"\"Weigh the values by their lengths, over all ranks of the group.\"\"\"
    total = sum(len(value) for value in values)  # of this rank
    lengths = torch.tensor([total], dtype=torch.float64)
    dist.all_reduce(lengths, group=group)
    for value in values:
        value.grad = value.grad * (total / lengths.item())
        dist.all_reduce(value.grad, group=group)
        self.seen = value
"""
COPY = """def weigh(values, group) -> None:
    total_length: int = sum(len(x) for x in values)
    t = torch.tensor([total_length], dtype=torch.float64)
    dist.all_reduce(t, group=group)
    for x in values:
        x.grad = x.grad * (total_length / t.item())

        dist.all_reduce(x.grad, group=group)
        self.last_one = x
"""


def test_new_names_do_not_hide_a_copy_and_what_was_handed_out_makes_none():
    """A docstring that everybody has once made honest exercises of two lines alike, and new names hid copies."""
    assert essence(ONE, HANDED_OUT) == essence(COPY, HANDED_OUT) != ""
    assert essence(HANDED_OUT, HANDED_OUT) == "" == essence("", HANDED_OUT)
    assert essence(ONE.replace("total /", "1 /")) != essence(ONE)
    assert essence("def f(:  # mine\n  x = 1") == "deff(:x=1", "code that does not compile is compared as text"


@pytest.mark.parametrize("lab", CHAPTERS)
def test_right_solutions_that_are_written_differently_are_not_alike(tmp_path, lab):
    stubs = stubs_of(CHAPTERS[lab])
    written = {piece["grade_id"]: piece["source"] for piece in pieces_of(hand_in(tmp_path, "anna", lab))}
    ours = {_defines(code): essence(code, stubs[name]) for name, code in written.items() if name}
    for path in sorted((ROOT / "tests" / "variants" / lab).glob("*.py")):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            own = ours.get(getattr(node, "name", None), "")
            other = essence(ast.unparse(node))
            if min(len(own), len(other)) >= dashboard.LEAST_CHARACTERS:
                assert fuzz.ratio(own, other) < 80, f"{node.name} of {path.name}"


def _defines(code: str) -> str | None:
    """Return the name of the only function or class that some code defines."""
    names = [node.name for node in ast.parse(code).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return names[0] if len(names) == 1 else None


def test_a_mistake_counts_once_for_a_student_however_many_checks_fail(tmp_path):
    unwritten = [Verdict("piece", check, False, (1,), NOT_WRITTEN, "Replace the line.") for check in ("values", "wire")]
    same = [
        Verdict("piece", "values", False, (1,), "rank 0 has 1.5"),
        Verdict("piece", "group", False, (3,), "rank 2 has 3.5"),
        Verdict("piece", "wire", False, (2,), f"{SAME_AS} “values”\n(Drawn with seed 5: 3 hidden units.)"),
    ]
    of_students = {"anna": unwritten, "ben": same, "clara": same}
    found = [
        Record(student, "00_ranks", "", [Answer("0.1", "piece", 0.0, 1.0, verdicts)])
        for student, verdicts in of_students.items()
    ]
    assert dashboard.commonest(found) == [
        ("0.1 piece", "values, group", "rank # has #", 2),
        ("0.1 piece", "values, wire", NOT_WRITTEN, 1),
    ]
    dashboard.write([*found, Record("dora", "00_ranks", "", [], reason="there is no notebook")], tmp_path)
    page = (tmp_path / "dashboard.html").read_text()
    assert "3 of 4 students handed in a notebook that could be graded, and earned 0.0" in page


def test_a_check_that_did_not_run_was_neither_tried_nor_failed():
    skipped = Verdict("piece", "wire", False, (), "this check runs when “values” passes")
    verdicts = [Verdict("piece", "values", False, (1,), "wrong"), skipped]
    found = [Record("anna", "00_ranks", "", [Answer("0.1", "piece", 0.0, 1.0, verdicts)])]
    assert dashboard.failures(found) == [("0.1 piece", "values", 1, 1)]
    assert dashboard.commonest(found) == [("0.1 piece", "values", "wrong", 1)]


FAILED = (
    "failed: AttributeError: no 'itme'\n    exercise 2.6, line {}: total.itme()\n(Drawn with seed 7: up to 9 steps.)"
)
HANG = """called only by ranks 1 and 2, with the group [1, 2]: Rank 1 is still running: exercise 2.1, line 7: loop()
Rank 2 is still running: exercise 2.1, line 7: loop()

rank  state    last call  at
1     running  none       exercise 2.1, line 7: loop()
2     running  none       exercise 2.1, line 7: loop()

The code was stopped after 60 s."""


def test_one_mistake_is_one_row_whichever_ranks_it_was_on():
    """A typing error once filled three rows, and a hang was a table without lines that was cut off."""
    verdicts = [
        Verdict("piece", "values", False, (1,), f"Rank 0 {FAILED.format(9)}"),
        Verdict("piece", "group", False, (3,), f"called only by ranks 1 and 2: Ranks 1, 2 {FAILED.format(9)}"),
        Verdict("piece", "wire", False, (4,), f"Ranks 0–3 {FAILED.format(10)}"),
    ]
    answers = [Answer("2.6", "a", 0.0, 1.0, verdicts)]
    answers += [Answer("2.1", "b", 0.0, 1.0, [Verdict("piece", "values", False, (3,), HANG)])]
    typo = "Rank # failed: AttributeError: no 'itme' · exercise #, line #: total.itme()"
    hang = "Rank # is still running: exercise #, line #: loop() · The code was stopped after # s."
    assert dashboard.commonest([Record("anna", "02_manual_ddp", "", answers)]) == [
        ("2.6 a", "values, group, wire", typo, 1),
        ("2.1 b", "values", hang, 1),
    ]


def test_equal_submissions_are_one_row():
    """Six equal submissions once filled 15 rows."""
    equal = [record(student, True, f"def piece():\n{LONG}") for student in "abcdef"]
    (group,) = dashboard.alike([*equal, record("z", False, "def piece(): return 1")])
    assert (group.students, group.exercises, group.percent) == (tuple("abcdef"), ("0.1",), 100)


def test_only_code_that_is_alike_with_everybody_else_s_is_in_a_group():
    percents = {("a", "b"): 91.0, ("b", "c"): 95.0, ("a", "c"): 92.0, ("c", "d"): 93.0}
    found = [(group.students, group.percent) for group in dashboard._grouped(("0.1",), percents)]
    assert found == [(("a", "b", "c"), 95.0), (("c", "d"), 93.0)]


def test_the_page_has_a_figure_and_tables_and_no_markup_of_students(tmp_path):
    hostile = record("<b>eve", False, "def piece(): return 1", reason="<script>")
    dashboard.write([*RECORDS, hostile], tmp_path)
    page = (tmp_path / "dashboard.html").read_text()
    assert "data:image/png;base64," in page and "<script" not in page and "<b>eve" not in page
    for text in ("4 students", "anna and ben", "rank # returned #", "&lt;script&gt;"):
        assert text in page


def test_a_lab_without_any_readable_notebook_has_a_page_too(tmp_path):
    dashboard.write([Record("anna", "00_ranks", "", [], reason="there is no notebook")], tmp_path)
    assert "No notebook could be graded (students: 1)." in (tmp_path / "dashboard.html").read_text()
