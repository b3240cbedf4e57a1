"""Grade one student's lab: start judges until every exercise has a verdict, or a reason why it has none."""

import time

from instructor.grade import sandbox, submissions
from instructor.grade.course import Course
from instructor.grade.limits import Limits
from instructor.grade.records import Answer, Record, digest_of, verdicts_from
from instructor.grade.submissions import Submission, Unreadable
from instructor.grade.tasks import Task, credit, module_of
from shared.checks.engine.verdicts import Verdict

MOST_WAITS = 3  # for a judge that tells nothing: then a submission is not tried any further
NOT_TRIED = "not tried any more"
KILLED_FROM = 128  # an exit status above it is that of a signal
BROUGHT_DOWN = "it brought down the processes that judge it"


class NotGraded(RuntimeError):
    """Why there is no record yet; it is not the student's fault."""


def grade(submission: Submission, course: Course, limits: Limits) -> Record:
    """→ the record of a submission, whatever was handed in

    Raises: NotGraded where this machine failed, and not the student's code.
    """
    began = time.monotonic()
    record = Record(submission.student, submission.lab, digest_of(submission, course.digest), [])
    answers: dict[str, Answer] = {}
    try:
        cells = submissions.pieces_of(submission, course.chapter)
        record.notes = [f"{name} lies beside the notebook and was not used" for name in submissions.beside(submission)]
        twice = submissions.twice_in(submission)
        record.notes += [f"{name} stands in several cells: they were run one after the other" for name in twice]
        answers = _judged(cells, submissions.others_in(submission), course, limits, record)
    except Unreadable as error:
        record.reason = str(error)
    for task in course.tasks:
        missing = Answer(task.number, task.name, 0.0, task.points, reason=record.reason or NOT_TRIED)
        record.answers.append(answers.get(task.name, missing))
    record.seconds = round(time.monotonic() - began, 1)
    return record


def _judged(cells: list[dict], others: list[str], course: Course, limits: Limits, record: Record) -> dict[str, Answer]:
    """→ the answers by the names of their tasks"""
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
            record.notes += [said for said in line.get("notes", []) if said not in record.notes]
            begun = line.get("begin", begun)
            if "done" in line:
                (task,) = (each for each in left if each.name == line["done"])
                answers[task.name] = _answer(task, verdicts_from(line["verdicts"]), line["reason"])
                left.remove(task)
            if "broken" in line:
                why = f"{BROUGHT_DOWN}: {line['reason']}"
        if not left:
            break
        if begun is None:  # while the cells were loaded: the same would come again
            return answers | {task.name: _answer(task, [], f"when its cells were loaded, {why}") for task in left}
        guilty = left.pop(0)
        answers[guilty.name] = _answer(guilty, [], why)
    return answers


def _answer(task: Task, verdicts: list[Verdict], reason: str) -> Answer:
    points = 0.0 if reason else credit(task.points, verdicts)
    return Answer(task.number, task.name, points, task.points, verdicts, reason)


def _last_words(ended: sandbox.Ended) -> str:
    if ended.status is None or ended.status > KILLED_FROM or ended.status < 0:
        return f"{BROUGHT_DOWN}: they were killed from within"
    said = ended.printed.strip().splitlines()[-1:] or ["without a word"]
    return f"{BROUGHT_DOWN}: exit status {ended.status}, {said[0][:200]}"
