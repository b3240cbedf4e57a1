"""Write dashboard.html: what a class found hard, exercise by exercise and check by check, and whose code is alike."""

import ast
import base64
import io
import re
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from matplotlib.figure import Figure
from rapidfuzz import fuzz

from instructor.build import chapters
from instructor.grade.choice import stubs_of
from instructor.grade.records import UNANSWERED, Answer, Record, one_line, write_whole
from shared.checks.engine.attempts import CALLED_ALONE
from shared.checks.engine.failures import NOT_WRITTEN
from shared.checks.engine.verdicts import SAME_AS
from shared.plots import COLORS, HATCHES, finish, new_axes
from shared.tables import render

MOST_WRONG = 10  # rows of the commonest wrong values, for each lab
MOST_GROUPS = 20
MOST_CHARACTERS = 300  # of what was wrong
MOST_OTHERS = 3  # students in the index
SAME = 99.95  # percent
ALIKE = 90.0  # percent; right solutions that are written differently are at most 77% alike (tests/variants)
LEAST_CHARACTERS = 200  # of the code that is compared; shorter solutions are alike by chance
STATES = ("passed", "partly passed", "failed", "unanswered")
DRAWN = re.compile(r"\n?\(Drawn with [^)]*\)")
NUMBER = re.compile(r"-?\d+(\.\d+)?(e[-+]?\d+)?")
RANKS = re.compile(r"\b([Rr]ank)s? \d+(?:(?:–|, | and )\d+)*")
GROUP = re.compile(rf"^{CALLED_ALONE}.*?: ")
NAME = re.compile(r"(\.?)\b([^\W\d]\w*)\b(?!=(?!=))")  # but no keyword of a call, which ast.unparse() writes as x=1
COMMENT = re.compile(r"#[^\n]*")
TABLE = re.compile(r"\n\nrank +state .*?(?=\n\n|\Z)", re.DOTALL)  # which rank waits where


@dataclass(frozen=True)
class Alike:
    """Students whose code for some exercises is similar. Each student's code is similar to everybody else's."""

    students: tuple[str, ...]
    percent: float  # of the two students and the exercise that are most alike
    exercises: tuple[str, ...]

    def about(self, student: str, names: dict[str, str]) -> str:
        """Return what the index says about a student in this group, or "" for others.

        Args:
            names: The students' names, if they are known.
        """
        if student not in self.students:
            return ""
        others = [names.get(other, other) for other in self.students if other != student]
        more = f" and {len(others) - MOST_OTHERS} more" if len(others) > MOST_OTHERS else ""
        whose = "; ".join(others[:MOST_OTHERS]) + more
        same = "the same as" if self.percent >= SAME else f"{self.percent:.0f}% the same as"
        return f"the code of {', '.join(self.exercises)} is {same} that of {whose}"


@dataclass(frozen=True)
class LabView:
    """What the page shows about one lab."""

    lab: str
    figure: str  # a PNG, base64
    students: int
    judged: int  # without those whose notebook is missing or cannot be read
    mean: float
    of: float
    seconds: tuple[float, float]  # median and maximum of grading
    checks: list[tuple[str, str, int, int]]  # exercise, check, failed, tried
    wrong: list[tuple[str, str, str, int]]  # exercise, check, what was wrong, how many students
    groups: list[Alike]
    more_groups: int  # that are not shown


def write(records: list[Record], folder: Path, groups: dict[str, list[Alike]] | None = None) -> None:
    """Write dashboard.html for all labs.

    Args:
        groups: The students whose code is similar, by lab, if this is known already.
    """
    groups = alike_by_lab(records) if groups is None else groups
    views = [_view(lab, own, groups.get(lab, [])) for lab, own in _by_lab(records).items()]
    page = render(__package__, "dashboard.html", labs=views, alike=ALIKE)
    write_whole(folder / "dashboard.html", page)


def alike_by_lab(records: list[Record]) -> dict[str, list[Alike]]:
    return {lab: alike([record for record in own if not record.reason]) for lab, own in _by_lab(records).items()}


def _by_lab(records: list[Record]) -> dict[str, list[Record]]:
    labs = sorted({record.lab for record in records})
    return {lab: [record for record in records if record.lab == lab] for lab in labs}


def _view(lab: str, records: list[Record], groups: list[Alike]) -> LabView:
    judged = [record for record in records if not record.reason]
    seconds = [record.seconds for record in judged] or [0.0]
    return LabView(
        lab,
        _as_png(exercises_figure(judged)) if judged else "",
        len(records),
        len(judged),
        statistics.fmean(record.points for record in judged) if judged else 0.0,
        judged[0].max_points if judged else 0.0,
        (statistics.median(seconds), max(seconds)),
        failures(judged),
        commonest(judged),
        groups[:MOST_GROUPS],
        len(groups[MOST_GROUPS:]),
    )


def state_of(answer: Answer) -> str:
    """Return how an exercise ended: one of `STATES`."""
    if answer.reason == UNANSWERED:
        return "unanswered"
    if answer.points >= answer.max_points:
        return "passed"
    return "partly passed" if answer.points > 0 else "failed"


def exercises_figure(records: list[Record]) -> Figure:
    """Draw a bar per exercise, split by how many students passed, failed or left it unanswered."""
    names = [f"{answer.number} {answer.name}" for answer in records[0].answers]
    figure, axes = new_axes(8.0, 0.9 + 0.34 * len(names))
    left = [0] * len(names)
    styles = zip(STATES, (COLORS[2], COLORS[5], COLORS[1], "white"), HATCHES, strict=False)
    for state, color, hatch in styles:
        counts = [sum(state_of(record.answers[row]) == state for record in records) for row in range(len(names))]
        bars = axes.barh(
            names, counts, left=left, color=color, hatch=hatch, edgecolor="black", linewidth=0.6, label=state
        )
        backing = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.bar_label(bars, [str(count) if count else "" for count in counts], label_type="center", size=8,
                       bbox=backing if any(counts) else None)  # fmt: skip
        left = [start + count for start, count in zip(left, counts, strict=True)]
    for text in [text for text in axes.texts if not text.get_text()]:
        text.set_visible(False)
    axes.invert_yaxis()
    axes.set(xlabel="students", xlim=(0, max(left) or 1))
    axes.locator_params(axis="x", integer=True)
    axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return finish(figure)


def failures(records: list[Record]) -> list[tuple[str, str, int, int]]:
    """Return for each check how many students failed it, and how many tried it. Most failures come first."""
    failed, tried = Counter(), Counter()
    for answer in (answer for record in records for answer in record.answers):
        for verdict in (verdict for verdict in answer.verdicts if verdict.ran):
            key = (f"{answer.number} {answer.name}", verdict.check)
            tried[key] += 1
            failed[key] += not verdict.passed
    ordered = sorted(tried, key=lambda key: (-failed[key], key))
    return [(*key, failed[key], tried[key]) for key in ordered if failed[key]]


def commonest(records: list[Record]) -> list[tuple[str, str, str, int]]:
    """Return what was wrong, in which checks, and for how many students, the most frequent mistakes first.

    What was wrong is the check's hint or, if it has none, its evidence without drawn numbers.
    """
    students: dict[tuple[str, str], set[str]] = {}
    checks: dict[tuple[str, str], dict[str, None]] = {}  # the keys are in the order in which they were found
    for record in records:
        for answer in record.answers:
            for check, what in _mistakes_in(answer):
                key = (f"{answer.number} {answer.name}", what)
                students.setdefault(key, set()).add(record.student)
                checks.setdefault(key, {}).update({check: None} if check else {})
    ordered = sorted(students, key=lambda key: -len(students[key]))[:MOST_WRONG]
    return [(own, ", ".join(checks[own, what]), what, len(students[own, what])) for own, what in ordered]


def _mistakes_in(answer: Answer) -> Iterator[tuple[str, str]]:
    """Yield each failed check with what was wrong. A check that refers to another one's mistake has none of its own."""
    if answer.reason and answer.reason != UNANSWERED:
        yield "", _without_numbers(answer.reason)
    for verdict in answer.verdicts:
        refers = verdict.evidence.startswith(SAME_AS)
        if verdict.ran and not verdict.passed and not refers and (verdict.hint or verdict.evidence):
            unwritten = verdict.evidence == NOT_WRITTEN
            yield verdict.check, NOT_WRITTEN if unwritten else verdict.hint or _without_numbers(verdict.evidence)


def _without_numbers(evidence: str) -> str:
    """Return what was wrong without what differs between ranks and runs, such as numbers and which ranks it were."""
    text = TABLE.sub("", GROUP.sub("", DRAWN.sub("", evidence)))
    lines = NUMBER.sub("#", RANKS.sub(r"\1 #", text)).splitlines()
    line = one_line(" · ".join(dict.fromkeys(line.strip() for line in lines if line.strip())))
    return line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} …"


def alike(records: list[Record]) -> list[Alike]:
    """Return groups of students with similar code, the most similar ones first. Short exercises are not compared.

    Names, comments and what was handed out make no difference. Similar code is a reason to look, but it is not proof.
    """
    found: dict[tuple[str, str], list[tuple[float, str]]] = {}
    labs = {record.lab for record in records}
    stubs = {name: code for lab in chapters() if lab.name in labs for name, code in stubs_of(lab).items()}
    for answer in records[0].answers if records else ():
        codes = {record.student: _compared(record, answer, stubs) for record in records}
        codes = {student: code for student, code in codes.items() if len(code) >= LEAST_CHARACTERS}
        for one, other in combinations(sorted(codes), 2):
            percent = fuzz.ratio(codes[one], codes[other], score_cutoff=ALIKE)
            if percent:
                found.setdefault((one, other), []).append((percent, answer.number))
    by_exercises: dict[tuple[str, ...], dict[tuple[str, str], float]] = {}
    for pair, each in found.items():
        by_exercises.setdefault(tuple(number for _, number in each), {})[pair] = max(each)[0]
    groups = [group for exercises, percents in by_exercises.items() for group in _grouped(exercises, percents)]
    return sorted(groups, key=lambda group: (-len(group.exercises), -group.percent, group.students))


def _grouped(exercises: tuple[str, ...], percents: dict[tuple[str, str], float]) -> list[Alike]:
    """Join pairs into groups in which everybody's code is similar, so that the copies of one solution share a row."""
    left, groups = dict(percents), []
    while left:
        group = list(next(iter(left)))
        for student in sorted({student for pair in left for student in pair} - set(group)):
            if all(tuple(sorted((student, member))) in left for member in group):
                group.append(student)
        inside = [left.pop(pair) for pair in combinations(sorted(group), 2)]
        groups.append(Alike(tuple(sorted(group)), max(inside), exercises))
    return groups


def _compared(record: Record, answer: Answer, stubs: dict[str, str]) -> str:
    own = next((each for each in record.answers if each.name == answer.name), answer)
    if own.reason == UNANSWERED:
        return ""
    return "\n".join(essence(record.code.get(cell, ""), stubs.get(cell, "")) for cell in answer.cells)


def _as_png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()


def essence(code: str, given: str = "") -> str:
    """Reduce code to what its author decided, so that copies look alike whatever names they use.

    What was handed out is left out, as it is the same for everybody: lines of the exercise's cell, docstrings,
    annotations. Comments and spaces go too. Names that the code itself gives are numbered in the order in which they
    appear.

    Args:
        given: The exercise's code as it was handed out.
    """
    theirs, ours = _plain(code), _plain(given)
    handed_out = set(ours.splitlines())
    left = "\n".join(line for line in theirs.splitlines() if line not in handed_out)
    own, numbers = _given_names(theirs), {}

    def number(found: re.Match) -> str:
        dot, name = found.groups()  # An attribute and a variable of the same name are two things.
        return f"{dot}v{numbers.setdefault((dot, name), len(numbers))}" if (dot, name) in own else found[0]

    return re.sub(r"\s+", "", NAME.sub(number, left))


def _plain(code: str) -> str:
    """Return code without comments, docstrings and annotations.

    Code that does not compile, or that is nested too deeply, loses only its comments.
    """
    try:
        return _bare(ast.parse(code))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return COMMENT.sub("", code)


def _bare(tree: ast.AST) -> str:
    """Return the code of a syntax tree without comments, docstrings and annotations."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(_WithoutAnnotations().visit(tree))


class _WithoutAnnotations(ast.NodeTransformer):
    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        value = node.value or ast.Constant(None)
        return ast.copy_location(ast.Assign([node.target], value, lineno=node.lineno), node)


def _given_names(code: str) -> set[tuple[str, str]]:
    """Return the names of variables, arguments and attributes that some code defines, attributes with a dot."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    stored = [node for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {node.id for node in stored if isinstance(node, ast.Name)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    attributes = {node.attr for node in stored if isinstance(node, ast.Attribute)}
    return {("", name) for name in names} | {(".", name) for name in attributes}
