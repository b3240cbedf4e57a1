"""Count caught mutants and passed variants by chapter, from the results of test_mutants.py."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from shared.tables import Table
from tests import mutants
from tests.runner.results import Outcome, Results

TESTS = Path(__file__).parent
KINDS = {
    "test_the_named_check_catches_the_mutant": "mutants",
    "test_a_right_solution_written_differently_passes": "variants",
}


@dataclass
class Report:
    """The results of one chapter's mutants and variants."""

    mutants: int = 0
    by_check: Counter[str] = field(default_factory=Counter)  # how many mutants each check caught
    variants: int = 0
    passed: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    tried: set[str] = field(default_factory=set)  # such as mutants/02_manual_ddp/summed

    @property
    def caught(self) -> int:
        return self.by_check.total()


def chapter_names(tests: Path = TESTS) -> list[str]:
    return sorted(path.parent.name for path in tests.parent.glob("source/*/lab.py"))


def read(results: Results) -> dict[str, Report]:
    """Return the results of each chapter's mutants and variants, by the chapter's name."""
    found: dict[str, Report] = {}
    for test in results.tests.values():
        function, _, test_id = test.name.rsplit("::", 1)[-1].partition("[")
        names = [name for name in chapter_names() if test_id.startswith(f"{name}-")]
        if function in KINDS and names:
            _count(found.setdefault(names[0], Report()), names[0], KINDS[function], test_id.rstrip("]"), test)
    return dict(sorted(found.items()))


def _count(report: Report, chapter: str, kind: str, test_id: str, test: Outcome) -> None:
    report.seconds += test.seconds
    report.tried.add(f"{kind}/{chapter}/{test_id.removeprefix(f'{chapter}-')}")
    passed = test.verdict == "passed"
    if not passed:
        report.problems.append(test_id)
    if kind == "mutants":
        report.mutants += 1
        if passed and "caught_by" in test.properties:
            report.by_check[test.properties["caught_by"]] += 1
    else:
        report.variants += 1
        report.passed += passed


def problems(found: dict[str, Report], chapters: tuple[str, ...], tests: Path = TESTS) -> list[str]:
    """List everything that is wrong: mutants that were not caught, and variants that did not pass.

    One that was not tried is a problem too, and so is one that belongs to no chapter.
    """
    messages = [f"failed: {problem}" for report in found.values() for problem in report.problems]
    expected = {path.relative_to(tests).with_suffix("").as_posix() for path in tests.glob("variants/*/*.py")}
    folder = tests / "mutants"
    for chapter in mutants.names(folder):
        expected |= {f"mutants/{chapter}/{mutant.name}" for mutant in mutants.of_chapter(chapter, folder)}
    others = set(chapter_names(tests)) - set(chapters)
    tried = set().union(*(report.tried for report in found.values()))
    missing = [path for path in sorted(expected - tried) if path.split("/")[1] not in others]
    messages += [f"was not tried: {path}" for path in missing]
    for name in chapters:
        counts = found.get(name, Report())
        messages += [f"{name} has no {kind}" for kind in KINDS.values() if not getattr(counts, kind)]
        if counts.caught < counts.mutants - len(counts.problems):
            messages.append(f"{name}: a mutant does not say which check caught it")
    return messages


def by_chapter(found: dict[str, Report]) -> Table:
    rows = [
        [name, f"{report.caught} / {report.mutants}", f"{report.passed} / {report.variants}", f"{report.seconds:.0f}"]
        for name, report in found.items()
    ]
    return Table(["chapter", "mutants caught", "variants passed", "seconds"], rows)


def by_check(found: dict[str, Report]) -> Table:
    counts = [(name, *entry) for name, report in found.items() for entry in report.by_check.most_common()]
    rows = [[name, check, str(count)] for name, check, count in counts]
    return Table(["chapter", "caught by", "mutants"], rows)
