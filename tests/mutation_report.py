"""How good the checks are: `make mutants`, or `python -m tests.mutation_report [02_manual_ddp …]`.

Runs tests/test_mutants.py, and prints for each chapter how many wrong solutions each check caught, how many right ones
passed, and the seconds. Exits 1 unless all were caught and all passed.
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from shared.build import chapters
from shared.tables import Table
from tests.run import PYTEST, ROOT

DEADLINE_S = 20 * 60


@dataclass
class Report:
    """What became of one chapter's mutants and variants."""

    mutants: int = 0
    by_check: Counter[str] = field(default_factory=Counter)  # mutants that it caught
    variants: int = 0
    passed: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def caught(self) -> int:
        return self.by_check.total()


def read(report: Path) -> dict[str, Report]:
    """→ chapter → what came of it, of a junit report of tests/test_mutants.py"""
    found: dict[str, Report] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test, _, case_id = case.get("name", "").partition("[")
        names = [chapter.name for chapter in chapters() if case_id.startswith(f"{chapter.name}-")]
        if not names:
            continue
        of_chapter = found.setdefault(names[0], Report())
        of_chapter.seconds += float(case.get("time", 0))
        failed = any(child.tag in ("failure", "error", "skipped") for child in case)
        if failed:
            of_chapter.problems.append(case_id.rstrip("]"))
        if test == "test_the_named_check_catches_the_mutant":
            of_chapter.mutants += 1
            named = [each.get("value") for each in case.iter("property") if each.get("name") == "caught_by"]
            of_chapter.by_check.update(named[:1] if not failed else [])
        else:
            of_chapter.variants += 1
            of_chapter.passed += not failed
    return dict(sorted(found.items()))


def as_tables(found: dict[str, Report]) -> str:
    rows = [
        [name, f"{each.caught} / {each.mutants}", f"{each.passed} / {each.variants}", f"{each.seconds:.0f}"]
        for name, each in found.items()
    ]
    checks = [[name, check, str(count)] for name, each in found.items() for check, count in each.by_check.most_common()]
    tables = [
        Table(["chapter", "mutants caught", "right ones passed", "seconds"], rows),
        Table(["chapter", "caught by", "mutants"], checks),
    ]
    problems = [f"not as it should be: {problem}" for each in found.values() for problem in each.problems]
    return "\n\n".join([*map(str, tables), *problems])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation_report", description=__doc__.splitlines()[0])
    parser.add_argument("chapter", nargs="*", help="only these, 02_manual_ddp for one")
    wanted = parser.parse_args().chapter
    unknown = set(wanted) - {chapter.name for chapter in chapters()}
    if unknown:
        parser.error(f"no such chapter: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [*PYTEST, "tests/test_mutants.py", "-q", "-n", "2", f"--junitxml={report}"]
        command += ["-k", " or ".join(f"{name}-" for name in wanted)] if wanted else ["-k", "mutant or right"]
        try:
            subprocess.run(command, cwd=ROOT, timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            print(f"stopped after {DEADLINE_S} s")
            return 1
        if not report.exists():
            print("pytest wrote no report: its own words are above")
            return 1
        found = read(report)
    print("\n" + as_tables(found))
    whole = found and all(not each.problems and each.mutants and each.variants for each in found.values())
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
