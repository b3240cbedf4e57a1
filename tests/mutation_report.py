"""Report how good the checks are: `make mutants`, or `python -m tests.mutation_report [02_manual_ddp …]`.

Runs test_mutants.py. For each chapter, prints how many mutants each check caught, how many variants passed, and
how long that took. Exits with 1 unless every mutant was caught and every variant passed. `make test ALL=1` prints the
table too.
"""

import argparse
import sys

from tests import mutation_results
from tests.runner import calibration
from tests.runner.execution import run_phase
from tests.runner.phases import MUTANTS, ROOT, Phase, pytest_command
from tests.runner.record import Record


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation_report", description=__doc__.splitlines()[0])
    parser.add_argument("chapter", nargs="*", help="only these chapters, such as 02_manual_ddp")
    wanted = parser.parse_args().chapter
    known = mutation_results.chapter_names()
    if unknown := sorted(set(wanted) - set(known)):
        parser.error(f"There is no chapter {', '.join(unknown)}. The chapters are {', '.join(known)}.")
    calibration.calibrate()
    workers = calibration.workers(calibration.cores() + 1)
    names = " or ".join(f"{name}-" for name in wanted) or "mutant or right"
    command = pytest_command(MUTANTS, "-n", str(workers), "-k", names)
    phase = Phase("mutants", (command,), is_pytest=True, workers=workers, mutants_of=tuple(wanted or known))
    result = run_phase(phase, ROOT, Record.load().seconds)
    problem = [result.problem] if result.problem else []
    tables = mutation_results.by_chapter(result.mutants), mutation_results.by_check(result.mutants)
    print("", *tables, *problem, sep="\n\n")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
