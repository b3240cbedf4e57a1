"""What came of wrong and right solutions, chapter by chapter, as a junit report of test_mutants.py tells it."""

import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from shared.tables import Table

TESTS = Path(__file__).parent
KINDS = {
    "test_the_named_check_catches_the_mutant": "mutants",
    "test_a_right_solution_written_differently_passes": "variants",
}


@dataclass
class Report:
    """What became of one chapter's mutants and variants."""

    mutants: int = 0
    by_check: Counter[str] = field(default_factory=Counter)  # mutants that it caught
    variants: int = 0
    passed: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)  # files below tests/

    @property
    def caught(self) -> int:
        return self.by_check.total()


def chapter_names(tests: Path = TESTS) -> list[str]:
    return sorted(path.parent.name for path in tests.parent.glob("source/*/lab.py"))


def read(report: Path) -> dict[str, Report]:
    """→ chapter → what came of it; nothing where pytest never came to write its report, or was killed while it did"""
    found: dict[str, Report] = {}
    try:
        cases = list(ElementTree.parse(report).iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return found
    for case in cases:
        test, _, case_id = case.get("name", "").partition("[")
        names = [name for name in chapter_names() if case_id.startswith(f"{name}-")]
        if test in KINDS and names:
            _count(found.setdefault(names[0], Report()), names[0], KINDS[test], case_id.rstrip("]"), case)
    return dict(sorted(found.items()))


def _count(report: Report, chapter: str, kind: str, case_id: str, case: ElementTree.Element) -> None:
    report.seconds += float(case.get("time", 0))
    report.tried.add(f"{kind}/{chapter}/{case_id.removeprefix(f'{chapter}-')}.py")
    failed = any(child.tag in ("failure", "error", "skipped") for child in case)
    if failed:
        report.problems.append(case_id)
    if kind == "mutants":
        report.mutants += 1
        named = [each.get("value") for each in case.iter("property") if each.get("name") == "caught_by"]
        report.by_check.update(named[:1] if not failed else [])
    else:
        report.variants += 1
        report.passed += not failed


def problems(found: dict[str, Report], chapters: list[str] | None = None, tests: Path = TESTS) -> list[str]:
    """Say what keeps this from being all caught and all passed: nothing may be missing either.

    chapters: those that were asked for, if not all.
    """
    said = [f"not as it should be: {problem}" for each in found.values() for problem in each.problems]
    expected = {path.relative_to(tests).as_posix() for kind in KINDS.values() for path in tests.glob(f"{kind}/*/*.py")}
    if chapters:
        expected = {path for path in expected if path.split("/")[1] in chapters}
    tried = set().union(*(each.tried for each in found.values()))
    said += [f"was not tried: {path}" for path in sorted(expected - tried)]
    for name in chapters or chapter_names(tests):
        counts = found.get(name, Report())
        said += [f"{name} has no {kind}" for kind in KINDS.values() if not getattr(counts, kind)]
        if counts.caught < counts.mutants - len(counts.problems):
            said.append(f"{name}: a mutant does not say who caught it")
    return said


def by_chapter(found: dict[str, Report]) -> Table:
    rows = [
        [name, f"{each.caught} / {each.mutants}", f"{each.passed} / {each.variants}", f"{each.seconds:.0f}"]
        for name, each in found.items()
    ]
    return Table(["chapter", "mutants caught", "right ones passed", "seconds"], rows)


def by_check(found: dict[str, Report]) -> Table:
    rows = [[name, check, str(count)] for name, each in found.items() for check, count in each.by_check.most_common()]
    return Table(["chapter", "caught by", "mutants"], rows)
