"""Grade students' notebooks: `make grade SUBMISSIONS=dir [CHAPTER=04]`, with `dir/<student>/<lab>/<notebook>.ipynb`.

Writes into build/grades/: gradebook.csv, exercises.csv, index.html with a feedback page per student, and a results.json
per student for Gradescope. If a run is stopped, the next one continues from there. Only what has changed is graded
again.
"""

import argparse
import contextlib
import fcntl
import sys
import unicodedata
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path

from instructor.build import ROOT, Chapter, chapters
from instructor.grade import course, feedback, gradebook, grading, records, sandbox, submissions
from instructor.grade.limits import Limits
from instructor.grade.records import Record
from instructor.grade.submissions import Submission
from instructor.release import ReleaseError, number_of

FOLDER = ROOT / "build" / "grades"
Grader = Callable[[Submission, course.Course, Limits], Record]


class Usage(ValueError):
    """Nothing can be graded; the message says why in one sentence."""


def grade_all(
    handed_in: Path,
    folder: Path,
    number: int | None = None,
    jobs: int = 1,
    limits: Limits | None = None,
    grader: Grader = grading.grade,
) -> list[Record]:
    """Grade every lab of every student, and save each record as soon as it exists. Returns all records.

    Raises:
        Usage: if there is nothing to grade.
        ReleaseError: if a lab's bundle cannot be made.
        sandbox.NoSandbox: if students' code cannot be isolated on this machine.
    """
    labs = _labs(handed_in, number)
    sandbox.require()
    found: dict[tuple[str, str], Record] = {}
    with _locked(folder), ThreadPoolExecutor(jobs) as workers:
        for lab in labs:
            with course.unpacked(lab) as judged_with:
                waiting: dict[Future, Submission] = {}
                for submission in submissions.find(handed_in, lab.name):
                    kept = records.load(folder, submission.student, lab.name)
                    if kept and kept.digest == records.digest_of(submission, judged_with.digest):
                        found[submission.student, lab.name] = kept
                    else:
                        waiting[workers.submit(grader, submission, judged_with, limits or Limits())] = submission
                _collect(waiting, found, folder)
        _write(found, folder)
    return [record for _, record in sorted(found.items())]


def _collect(waiting: dict[Future, Submission], found: dict[tuple[str, str], Record], folder: Path) -> None:
    """Save each record as soon as it exists. Each one is saved completely before the next."""
    try:
        for future in as_completed(waiting):
            record = _result(future, waiting[future])
            found[record.student, record.lab] = record
            _keep(record, folder)
            _write(found, folder)
            print(_line(record), flush=True)
    finally:
        for future in waiting:
            future.cancel()


def _labs(handed_in: Path, number: int | None) -> list[Chapter]:
    if not handed_in.is_dir():
        raise Usage(
            f"there is no folder {handed_in}; SUBMISSIONS must name a folder that contains one folder per student"
        )
    if not submissions.students_in(handed_in):
        raise Usage(f"{handed_in} has no folders; each student's work must be in a folder with the student's name")
    by_number = {number_of(chapter): chapter for chapter in chapters()}
    if number is not None and number not in by_number:
        raise Usage(
            f"there is no chapter {number:02d}; the chapters are {', '.join(f'{known:02d}' for known in by_number)}"
        )
    labs = [by_number[number]] if number is not None else submissions.labs_in(handed_in)
    if not labs:
        names = ", ".join(chapter.name for chapter in by_number.values())
        raise Usage(
            f"no student in {handed_in} has a notebook for any of the labs ({names}); "
            "to grade one lab anyway, name its chapter: CHAPTER=04"
        )
    return labs


def _result(future: Future, submission: Submission) -> Record:
    try:
        return future.result()
    except Exception as error:  # A submission that makes the grader fail must not stop the others.
        return records.not_graded(submission, error)


def _keep(record: Record, folder: Path) -> None:
    if record.final:
        records.save(record, folder)
    feedback.write(record, folder)
    gradebook.write_gradescope(record, folder)


def _write(found: dict[tuple[str, str], Record], folder: Path) -> None:
    students = {student for student, _ in found}
    everything = []
    for _, record in sorted(found.items()):
        others = sorted(students - {record.student})
        namesakes = [student for student in others if _normalized(student) == _normalized(record.student)]
        alike = [f"{student} has the same name except for case or Unicode form" for student in namesakes]
        everything.append(replace(record, notices=[*record.notices, *alike]))
    gradebook.write(everything, folder)
    feedback.write_index(everything, folder)


def _normalized(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder of grades.

    Raises:
        Usage: if another grader is writing there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another grader is writing to {folder}; wait until it ends, or choose another folder with --into"
            raise Usage(message) from None
        yield


def _line(record: Record) -> str:
    points = f"{record.points:g}/{record.max_points:g}"
    return f"{records.one_line(record.student)}  {record.lab}  {points}  {record.why}  ({record.seconds:.0f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m instructor.grade", description=__doc__.splitlines()[0])
    parser.add_argument("submissions", type=Path, help="a folder with one folder per student")
    parser.add_argument("--chapter", type=int, help="such as 04; default: every lab for which there is a notebook")
    parser.add_argument("--into", type=Path, default=FOLDER, help="default: build/grades")
    parser.add_argument(
        "--jobs", type=int, default=1, help="how many submissions to grade at once; plan 2 cores for each"
    )
    parser.add_argument("--seconds", type=float, default=Limits.seconds_each, help="time limit for one exercise")
    options = parser.parse_args()
    try:
        graded = grade_all(
            options.submissions,
            options.into,
            options.chapter,
            max(1, options.jobs),
            replace(Limits(), seconds_each=options.seconds),
        )
    except (Usage, ReleaseError, sandbox.NoSandbox) as error:
        parser.error(str(error))
    print(f"{len(graded)} graded. See {options.into}/gradebook.csv and {options.into}/index.html.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
