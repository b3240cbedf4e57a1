"""Grade students' notebooks: `make grade SUBMISSIONS=dir [CHAPTER=04]`, with `dir/<student>/<lab>/<notebook>.ipynb`.

Writes into build/grades/: gradebook.csv, exercises.csv and totals.csv, index.html with a feedback page per student,
dashboard.html about the class, and a results.json per student for Gradescope. If a run is stopped, the next one
continues from there. Only what has changed is graded again.
"""

import argparse
import contextlib
import difflib
import fcntl
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from instructor.build import Chapter, chapters
from instructor.grade import course, finding, grading, machine_load, platforms, policy, records, sandbox, tasks
from instructor.grade.limits import Limits
from instructor.grade.outputs import Outputs
from instructor.grade.records import Record
from instructor.grade.submissions import Submission
from instructor.release import ReleaseError, number_of
from shared.checks.terminal import show_anything

ANONYMOUS = "also write pages and tables with codes instead of names; names in code and error messages stay"
LEAST_DONE = 3  # The first to be done are the quick ones.
Grader = Callable[..., Record]  # takes a submission, a course, limits and, if there are any, answers to keep


class Stopped(Exception):
    """Somebody pressed Ctrl-C; the message says what is saved and how to continue."""


class Usage(ValueError):
    """Nothing can be graded; the message says why in one sentence."""


@dataclass(frozen=True)
class Request:
    """What to grade, and how.

    Args:
        number: The chapter. None grades every lab for which anybody handed in something.
        students: The students whose work is graded again, even if it has not changed. None grades only changed work.
        exercise: The only exercise that is graded again, such as "2.4". All others keep their verdicts.
        jobs: How many submissions are graded at once.
        anonymous: Whether to write pages and tables without names, too.
    """

    number: int | None = None
    students: tuple[str, ...] | None = None
    exercise: str | None = None
    jobs: int = 1
    limits: Limits = field(default_factory=Limits)
    anonymous: bool = False

    def asks_for(self, student: str, exercises: list[str]) -> bool:
        """Return whether a student's work in a lab with these exercises is graded again, even if nothing changed."""
        if self.exercise is not None and self.exercise not in exercises:
            return False
        return student in self.students if self.students else self.exercise is not None


def grade_all(
    handed_in: Path, folder: Path, request: Request | None = None, grader: Grader = grading.grade
) -> list[Record]:
    """Grade every lab of every student, and save each record as soon as it exists. Returns all records.

    Raises:
        Usage: if there is nothing to grade.
        policy.Mistake: if course.toml or overrides.csv cannot be used.
        ReleaseError: if a lab's bundle cannot be made.
        sandbox.NoSandbox: if students' code cannot be isolated on this machine.
        Stopped: after Ctrl-C.
    """
    request = request or Request()
    labs = _labs(handed_in, request)
    exercises = {lab.name: [task.number for task in tasks.tasks_of(lab)] for lab in labs}
    _check_names(handed_in, request, exercises)
    students = [student.name for student in finding.students_in(handed_in)]
    decisions = policy.load(handed_in / "course.toml", folder / policy.OVERRIDES, students)
    sandbox.require()
    outputs = Outputs(folder, decisions, request.anonymous)
    with _locked(folder), ThreadPoolExecutor(request.jobs) as workers:
        for lab in labs:
            with course.unpacked(lab) as judged_with:
                waiting: dict[Future, Submission] = {}
                for submission in finding.find(handed_in, lab.name):
                    kept = records.load(folder, submission.student, lab.name)
                    unchanged = kept and kept.digest == records.digest_of(submission, judged_with.digest)
                    again = request.asks_for(submission.student, exercises[lab.name])
                    if not again and (unchanged or request.students):
                        if kept:
                            outputs.add(kept, submission)
                        continue
                    grades = grader
                    if request.exercise and kept and kept.notebook in ("", records.digest_of(submission, "")):
                        grades = functools.partial(_grade_one_exercise, grader, kept, request.exercise)
                    waiting[workers.submit(grades, submission, judged_with, request.limits)] = submission
                _collect(waiting, outputs)
        for sentence in decisions.unused(students, exercises):
            print(f"{sentence}.", flush=True)
        everything = outputs.write_all()
        for sentence in policy.remarks(everything):
            print(f"{sentence}.", flush=True)
        return everything


def _grade_one_exercise(
    grader: Grader, kept: Record, exercise: str, submission: Submission, judged_with: course.Course, limits: Limits
) -> Record:
    """Grade one exercise again, and keep the other verdicts, the notices and the notes about the same notebook."""
    known = [answer for answer in kept.answers if answer.number != exercise]
    record = grader(submission, judged_with, limits, known=known) if known else grader(submission, judged_with, limits)
    record.notices = record.notices or kept.notices  # A judge that had nothing to run found no notices.
    record.notes = list(dict.fromkeys([*record.notes, *kept.notes]))
    return record


def _check_names(handed_in: Path, request: Request, exercises: dict[str, list[str]]) -> None:
    """Check that the students and the exercise of a request exist.

    Raises:
        Usage: if one of them does not.
    """
    students = [student.name for student in finding.students_in(handed_in)]
    for name in request.students or ():
        if name not in students:
            close = difflib.get_close_matches(name, students, cutoff=0.3) or students[:3]
            raise Usage(f"{handed_in} has no student {name!r}; similar names are {', '.join(map(repr, close))}")
    numbers = [number for of_lab in exercises.values() for number in of_lab]
    if request.exercise is not None and request.exercise not in numbers:
        raise Usage(f"there is no exercise {request.exercise!r}; the exercises are {', '.join(numbers)}")


def _collect(waiting: dict[Future, Submission], outputs: Outputs) -> None:
    """Save each record as soon as it exists. Each one is saved completely before the next.

    Raises:
        Stopped: after Ctrl-C. The first one lets the submissions in progress finish, the second one drops them.
    """
    left = dict(waiting)
    try:
        _save_as_completed(left, outputs)
    except KeyboardInterrupt:
        for future in waiting:
            future.cancel()
        print("\nThe submissions in progress are still being graded. Press Ctrl-C again to stop now.", flush=True)
        try:
            _save_as_completed({future: left[future] for future in left if not future.cancelled()}, outputs)
        except KeyboardInterrupt:
            sandbox.stopping.set()
        graded = sum(record.final for record in outputs.records.values())
        raise Stopped(f"Graded so far: {graded}. Run the same command again to grade the others.") from None
    finally:
        for future in waiting:
            future.cancel()


def _save_as_completed(waiting: dict[Future, Submission], outputs: Outputs) -> None:
    submitted, began = len(waiting), time.monotonic()
    for future in as_completed(list(waiting)):
        record = outputs.save(_result(future, waiting[future]), waiting[future])
        del waiting[future]
        done = submitted - len(waiting)
        print(_line(record, f"{done} of {submitted}{_left(time.monotonic() - began, done, submitted)}"), flush=True)


def _left(seconds: float, done: int, submitted: int) -> str:
    """Return about how long the other submissions of a lab will take, in words, once that can be estimated."""
    left = seconds / done * (submitted - done)
    if not left or done < LEAST_DONE:
        return ""
    return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"


def _labs(handed_in: Path, request: Request) -> list[Chapter]:
    number = request.number
    if handed_in.is_file() or (handed_in.is_dir() and platforms.looks_like_a_download(handed_in)):
        raise Usage(
            f"{handed_in} is a platform's download; sort it into folders first: "
            f'python -m instructor.grade.lms_zips "{handed_in}"'
        )
    if not handed_in.is_dir():
        raise Usage(
            f"there is no folder {handed_in}; SUBMISSIONS must name a folder that contains one folder per student"
        )
    if not finding.students_in(handed_in):
        raise Usage(f"{handed_in} has no folders; each student's work must be in a folder with the student's name")
    by_number = {number_of(chapter): chapter for chapter in chapters()}
    if number is not None and number not in by_number:
        raise Usage(
            f"there is no chapter {number:02d}; the chapters are {', '.join(f'{known:02d}' for known in by_number)}"
        )
    labs = [by_number[number]] if number is not None else finding.labs_in(handed_in)
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
    except grading.NotGraded as error:
        return records.not_graded(submission, str(error))
    except Exception as error:  # A submission that makes the grader fail must not keep the others from being graded.
        return records.not_graded(submission, f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of the folder of grades.

    Raises:
        Usage: if another grader is writing there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = f"another grader is writing to {folder}; wait until it ends, or choose another folder with --into"
            raise Usage(message) from None
        yield


def _line(record: Record, how_many: str) -> str:
    points, student = f"{record.points:g}/{record.max_points:g}", records.one_line(record.student)
    return f"{student}  {record.lab}  {points}  {record.why}  ({record.seconds:.0f} s, {how_many})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m instructor.grade", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("submissions", type=Path, help="a folder with one folder per student, and perhaps course.toml")
    parser.add_argument("--chapter", type=int, help="such as 04; default: every lab for which there is a notebook")
    parser.add_argument("--into", type=Path, default=records.FOLDER, help="default: build/grades")
    parser.add_argument("--student", action="append", help="grade only this student again; may be given several times")
    parser.add_argument("--exercise", help="grade this exercise again, such as 2.4, and keep the other verdicts")
    parser.add_argument("--anonymous", action="store_true", help=ANONYMOUS)
    parser.add_argument("--jobs", type=int, help="how many submissions to grade at once; default: two per core")
    return parser


def main() -> int:
    show_anything()
    parser = _parser()
    options = parser.parse_args()
    jobs = machine_load.most_jobs() if options.jobs is None else max(1, options.jobs)
    memory_bytes = min(Limits.memory_bytes, machine_load.most_memory_bytes(jobs))
    request = Request(
        options.chapter,
        tuple(options.student) if options.student else None,
        options.exercise,
        jobs,
        Limits(memory_bytes=memory_bytes),
        options.anonymous,
    )
    try:
        graded = grade_all(options.submissions, options.into, request)
    except (Usage, policy.Mistake, ReleaseError, sandbox.NoSandbox) as error:
        parser.error(str(error))
    except (Stopped, KeyboardInterrupt) as stopped:
        print(stopped if str(stopped) else "Grading was stopped. Run the same command again to continue.")
        return 130  # 128 + SIGINT, as shells expect
    except OSError as error:
        what = f"{error.strerror}: {error.filename or options.into}"
        print(f"Grading was stopped ({what}). Make room or choose another folder with --into, and run this again.")
        return 1
    pages = f"{options.into}/index.html and {options.into}/dashboard.html"
    print(f"Graded submissions: {len(graded)}. See {options.into}/gradebook.csv, {pages}.")
    return 0
