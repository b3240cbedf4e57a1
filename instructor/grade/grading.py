"""Grade one student's lab: start judges until every exercise has a verdict, or a reason why it has none."""

import time

from instructor.grade import sandbox, submissions
from instructor.grade.course import Course
from instructor.grade.limits import Limits
from instructor.grade.records import Answer, Record, digest_of, verdicts_from
from instructor.grade.submissions import Submission, Unreadable
from instructor.grade.tasks import Task, credit, module_of
from shared.checks.engine.verdicts import Verdict

MOST_WAITS = 3  # A submission gets the time of this many exercises that never end.
NOT_TRIED = "not graded, because earlier exercises used all of this submission's time"
KILLED_FROM = 128  # An exit status above this one stands for a signal.
TOOK_DOWN = "the code crashed the processes that grade it"


class NotGraded(RuntimeError):
    """There is no record yet, and the cause is not the student's code."""


def grade(submission: Submission, course: Course, limits: Limits) -> Record:
    """Return the record of a submission, whatever was handed in.

    Raises:
        NotGraded: if this machine failed, and not the student's code.
    """
    began = time.monotonic()
    record = Record(submission.student, submission.lab, digest_of(submission, course.digest), [])
    answers: dict[str, Answer] = {}
    try:
        cells = submissions.pieces_of(submission, course.chapter)
        files = submissions.other_files(submission)
        record.notes = [f"{name} was handed in beside the notebook and was not used" for name in files]
        repeated = submissions.repeated_exercises(submission)
        record.notes += [f"{name} is in several cells, which were run one after the other" for name in repeated]
        answers = _judged(cells, submissions.other_cells(submission), course, limits, record)
    except Unreadable as error:
        record.reason = str(error)
    for task in course.tasks:
        missing = Answer(task.number, task.name, 0.0, task.points, reason=record.reason or NOT_TRIED)
        record.answers.append(answers.get(task.name, missing))
    record.seconds = round(time.monotonic() - began, 1)
    return record


def _judged(cells: list[dict], others: list[str], course: Course, limits: Limits, record: Record) -> dict[str, Answer]:
    """Return the answers by the names of their tasks."""
    answers: dict[str, Answer] = {}
    left = list(course.tasks)
    deadline = time.monotonic() + MOST_WAITS * limits.seconds_each
    while left and time.monotonic() < deadline:
        job = {
            "module": module_of(course.chapter),
            "cells": cells,
            "others": others,
            "forbidden": course.withheld,
            "tasks": [{"name": task.name, "cells": task.cells} for task in left],
        }
        ended = sandbox.run("instructor.grade.judge", job, course.folder, limits)
        if {"ready": True} not in ended.lines:
            raise NotGraded(f"the judge did not start: {ended.why or ended.printed.strip()[-500:] or ended.status}")
        why = ended.why or _last_words(ended)
        begun = None
        for line in ended.lines:
            record.notices = line.get("notices", record.notices)
            record.notes += [note for note in line.get("notes", []) if note not in record.notes]
            begun = line.get("begin", begun)
            if "done" in line:
                (task,) = (task for task in left if task.name == line["done"])
                answers[task.name] = _answer(task, verdicts_from(line["verdicts"]), line["reason"])
                left.remove(task)
            if "broken" in line:
                why = f"{TOOK_DOWN}: {line['reason']}"
        if not left:
            break
        if begun is None:  # The cells could not be loaded, so another judge would fail in the same way.
            return answers | {task.name: _answer(task, [], f"while the cells were loaded, {why}") for task in left}
        guilty = left.pop(0)
        answers[guilty.name] = _answer(guilty, [], why)
    return answers


def _answer(task: Task, verdicts: list[Verdict], reason: str) -> Answer:
    points = 0.0 if reason else credit(task.points, verdicts)
    return Answer(task.number, task.name, points, task.points, verdicts, reason)


def _last_words(ended: sandbox.Ended) -> str:
    if ended.status is None or ended.status > KILLED_FROM or ended.status < 0:
        return f"{TOOK_DOWN}: they were killed from inside the sandbox"
    printed = ended.printed.strip().splitlines()
    last_line = f"and last printed: {printed[-1][:200]}" if printed else "and printed nothing"
    return f"{TOOK_DOWN}: they ended with exit status {ended.status} {last_line}"
