"""make grade SUBMISSIONS=dir [CHAPTER=04]: grade what students handed in, `dir/<student>/<lab>/<notebook>.ipynb`.

Writes gradebook.csv, exercises.csv, index.html with a feedback page per student, and a results.json each for Gradescope
into build/grades/. A grader that was stopped goes on where it was; what was handed in anew is graded anew.
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
    """What cannot be graded at all, in one sentence."""


def grade_all(
    handed_in: Path,
    folder: Path,
    number: int | None = None,
    jobs: int = 1,
    limits: Limits | None = None,
    grader: Grader = grading.grade,
) -> list[Record]:
    """Grade every student's every lab, and keep each record as soon as it is there. → all records

    Raises: Usage, ReleaseError, sandbox.NoSandbox
    """
    labs = _labs(handed_in, number)
    sandbox.require()
    found: dict[tuple[str, str], Record] = {}
    with _alone_in(folder), ThreadPoolExecutor(jobs) as workers:
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
    """Keep each record as soon as it is there, whole on disk before the next."""
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
        raise Usage(f"there is no folder {handed_in}: SUBMISSIONS is a folder with one folder per student")
    if not submissions.students_in(handed_in):
        raise Usage(f"{handed_in} has no folders: each student's work is expected in a folder of their name")
    known = {number_of(chapter): chapter for chapter in chapters()}
    if number is not None and number not in known:
        raise Usage(f"there is no chapter {number:02d}: {', '.join(f'{each:02d}' for each in known)}")
    labs = [known[number]] if number is not None else submissions.labs_in(handed_in)
    if not labs:
        names = ", ".join(chapter.name for chapter in known.values())
        raise Usage(f"no student in {handed_in} has a notebook of one of these labs: {names}. Name one: CHAPTER=04")
    return labs


def _result(future: Future, submission: Submission) -> Record:
    try:
        return future.result()
    except Exception as error:  # one submission that the grader trips over must not keep the others from being graded
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
        namesakes = sorted(each for each in students - {record.student} if _plain(each) == _plain(record.student))
        alike = [f"{each} has the same name, written differently" for each in namesakes]
        everything.append(replace(record, notices=[*record.notices, *alike]))
    gradebook.write(everything, folder)
    feedback.write_index(everything, folder)


def _plain(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Raises: Usage when another grader writes here."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Usage(f"another grader writes into {folder}: wait for it, or name another folder: --into") from None
        yield


def _line(record: Record) -> str:
    points = f"{record.points:g}/{record.max_points:g}"
    return f"{records.one_line(record.student)}  {record.lab}  {points}  {record.why}  ({record.seconds:.0f} s)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m instructor.grade", description=__doc__.splitlines()[0])
    parser.add_argument("submissions", type=Path, help="a folder with one folder per student")
    parser.add_argument("--chapter", type=int, help="04, say; by default every lab of which there are notebooks")
    parser.add_argument("--into", type=Path, default=FOLDER, help="default: build/grades")
    parser.add_argument("--jobs", type=int, default=1, help="how many submissions at once; 2 cores serve one well")
    parser.add_argument("--seconds", type=float, default=Limits.seconds_each, help="the most for one exercise")
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
    print(f"{len(graded)} graded: {options.into}/gradebook.csv and {options.into}/index.html")
    return 0


if __name__ == "__main__":
    sys.exit(main())
