"""How good the checks are: `make mutants`, or `python -m tests.mutation_report [02_manual_ddp …]`.

Runs tests/test_mutants.py, and prints for each chapter how many wrong solutions each check caught, how many right ones
passed, and the seconds. Exits 1 unless all were caught and all passed. `make test` prints the first table too.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import mutation_results
from tests.run import PYTEST, ROOT

DEADLINE_S = 20 * 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation_report", description=__doc__.splitlines()[0])
    parser.add_argument("chapter", nargs="*", help="only these, 02_manual_ddp for one")
    wanted = parser.parse_args().chapter
    unknown = set(wanted) - set(mutation_results.chapter_names())
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
        found = mutation_results.read(report)
    problems = mutation_results.problems(found, wanted)
    print("", mutation_results.by_chapter(found), mutation_results.by_check(found), *problems, sep="\n\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
