"""Run every check of its exercise on each mutant and variant: `python -m tests.matrix [01_collectives …]`.

The kill matrix, build/matrix.json, has the verdict and the hint of each check, all with the same seed. A second run
judges only what is missing or has changed: a mutant, or the checks of its chapter. The report lists checks that catch
no mutant alone, and mutants that no check tells apart. `--compare OLD` lists the differences from another matrix.
"""

import argparse
import contextlib
import hashlib
import io
import json
import multiprocessing.util
import os
import signal
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from shared import ranks
from shared.checks.__main__ import exercises_of, run_file
from shared.checks.engine.failures import Unusable
from shared.deadlines import scaled
from tests import mutants

ROOT = Path(__file__).parent.parent
MATRIX = ROOT / "build" / "matrix.json"
SEED = 0
CHECK_TIMEOUT_S = int(scaled(180))
CAUGHT = ("failed", "too slow", "unusable")


@dataclass
class Result:
    verdict: str  # "passed", "failed", "did not run", "too slow" or "unusable"
    hint: str = ""


@dataclass
class Row:
    """What the checks of an exercise say about a mutant, or all checks of a chapter about a variant."""

    fingerprint: str  # of its code and the checks
    results: dict[str, Result] = field(default_factory=dict)  # by exercise and check, such as "ring_step · values"

    @property
    def caught_by(self) -> set[str]:
        return {check for check, result in self.results.items() if result.verdict in CAUGHT}


Matrix = dict[str, Row]  # by name, such as "mutants/01_collectives/step_from_the_right"


@dataclass(frozen=True)
class Job:
    name: str
    module: str
    exercise: str  # "" for all
    check: str  # "" for all
    code: str
    fingerprint: str


class TooSlow(BaseException):
    """The error when a check takes too long. No `except Exception` may catch it."""


def jobs_of(chapter: str, named_only: bool) -> list[Job]:
    module = mutants.module_of(chapter)
    checks = hashlib.sha256()
    for part in (module, "engine", "models"):
        for path in sorted((ROOT / "shared" / "checks" / part).rglob("*.py")):
            checks.update(path.read_bytes())

    def job(name: str, exercise: str, check: str, code: str) -> Job:
        digest = checks.copy()
        digest.update(f"{exercise}\n{check}\n{code}".encode())
        return Job(name, module, exercise, check, code, digest.hexdigest()[:16])

    jobs = [
        job(f"mutants/{chapter}/{each.name}", each.exercise, each.check if named_only else "", each.code())
        for each in mutants.of_chapter(chapter)
    ]
    for path in sorted((ROOT / "tests" / "variants" / chapter).glob("*.py")) if not named_only else ():
        jobs.append(job(f"variants/{chapter}/{path.stem}", "", "", path.read_text()))
    return jobs


def start_worker() -> None:
    torch.set_num_threads(1)
    sys.stdout = io.StringIO()
    signal.signal(signal.SIGALRM, _stop)
    ranks.start(world_size=4, detect_mismatch=False)
    multiprocessing.util.Finalize(None, ranks.stop, exitpriority=10)


def _stop(*_) -> None:
    raise TooSlow


def judge(job: Job) -> Row:
    """Run each check on a mutant or variant, in a worker."""
    row = Row(job.fingerprint)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{job.name.rsplit('/', 1)[-1]}.py"
        path.write_text(job.code)
        for exercise in exercises_of(job.module):
            for check in exercise.checks:
                if job.exercise in ("", exercise.piece) and job.check in ("", check.name):
                    result = _result(job.module, path, exercise.piece, check.name)
                    row.results[f"{exercise.piece} · {check.name}"] = result
    return row


def _result(module: str, path: Path, piece: str, check: str) -> Result:
    signal.alarm(CHECK_TIMEOUT_S)
    try:
        (verdict,) = run_file(module, path, SEED, piece, check)
    except Unusable:
        return Result("unusable")
    except TooSlow:
        ranks.stop()
        ranks.start(world_size=4, detect_mismatch=False)
        return Result("too slow")
    finally:
        signal.alarm(0)
    verdicts = "passed" if verdict.passed else "failed" if verdict.ran else "did not run"
    return Result(verdicts, verdict.hint)


def read(path: Path) -> Matrix:
    rows = json.loads(path.read_text()) if path.exists() else {}
    return {
        name: Row(row["fingerprint"], {check: Result(**result) for check, result in row["results"].items()})
        for name, row in rows.items()
    }


def write(matrix: Matrix, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps({name: asdict(row) for name, row in sorted(matrix.items())}, indent=1))
    whole.replace(path)  # An interrupted run leaves what it has judged.


def fill(matrix: Matrix, jobs: list[Job], path: Path, workers: int) -> None:
    """Judge what is missing or has changed, and write the matrix after each."""
    due = [job for job in jobs if job.name not in matrix or matrix[job.name].fingerprint != job.fingerprint]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=start_worker) as pool:
        running = {pool.submit(judge, job): job for job in due}
        for count, done in enumerate(as_completed(running), 1):
            job = running[done]
            matrix[job.name] = done.result()
            write(matrix, path)
            caught = sorted(matrix[job.name].caught_by)
            print(f"{count}/{len(due)} {job.name}: {', '.join(caught) or 'passes'}", flush=True)


def report(matrix: Matrix) -> list[str]:
    """List the checks that catch no mutant alone, and the mutants with the same verdicts and hints."""
    catches, alone, alike = defaultdict(int), defaultdict(int), defaultdict(list)
    for name, row in matrix.items():
        kind, chapter, mutant = name.split("/")
        for check in row.results if kind == "mutants" else ():
            catches[chapter, check] += check in row.caught_by
            alone[chapter, check] += row.caught_by == {check}
        if kind == "mutants":
            verdicts = ((check, result.verdict, result.hint) for check, result in row.results.items())
            alike[chapter, *verdicts].append(mutant)
    lines = [
        f"{chapter}: {check} catches {count} mutants, none of them alone"
        for (chapter, check), count in catches.items()
        if not alone[chapter, check]
    ]
    same = [f"{key[0]}: no check tells apart {', '.join(found)}" for key, found in alike.items() if len(found) > 1]
    return lines + same


def differences(old: Matrix, new: Matrix) -> list[str]:
    lines = [
        f"{name}: only in the {'old' if name in old else 'new'} matrix" for name in sorted(old.keys() ^ new.keys())
    ]
    for name in sorted(old.keys() & new.keys()):
        for check in sorted(old[name].results.keys() | new[name].results.keys()):
            before, after = old[name].results.get(check), new[name].results.get(check)
            if before != after:
                lines.append(f"{name}, {check}: {before or 'no check'} → {after or 'no check'}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__.splitlines()[0])
    parser.add_argument("chapter", nargs="*", help="only these chapters, such as 01_collectives")
    parser.add_argument("--out", type=Path, default=MATRIX, help="the matrix to fill")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes, each with 4 ranks")
    parser.add_argument("--named-only", action="store_true", help="run only the check that each mutant names")
    parser.add_argument("--compare", type=Path, metavar="OLD", help="only list the differences from this matrix")
    options = parser.parse_args()
    matrix = read(options.out)
    chapters = options.chapter or mutants.names()
    if not options.compare:
        with contextlib.suppress(KeyboardInterrupt):
            fill(
                matrix,
                [job for name in chapters for job in jobs_of(name, options.named_only)],
                options.out,
                options.workers,
            )
    chosen = {name: row for name, row in matrix.items() if name.split("/")[1] in chapters}
    if options.compare:
        old = {name: row for name, row in read(options.compare).items() if name.split("/")[1] in chapters}
        lines = differences(old, chosen)
        print(*lines, sep="\n")
        return 1 if lines else 0
    print(*report(chosen), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
