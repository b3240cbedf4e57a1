"""Grade one student's lab: start judges until every exercise has verdicts, or a reason why it has none."""

import os
import re
import time
from collections.abc import Sequence
from dataclasses import replace

from instructor.grade import assembly, cgroup, machine_load, sandbox, static_checks, submissions
from instructor.grade.course import Course
from instructor.grade.limits import Limits
from instructor.grade.reader import Unreadable
from instructor.grade.records import UNANSWERED, Answer, Record, digest_of, verdicts_from
from instructor.grade.submissions import Submission
from instructor.grade.tasks import Task, credit, module_of
from shared import deadlines, mine
from shared.checks.engine.verdicts import Verdict
from shared.deadlines import scaled
from shared.ranks.diagnosis import KILLED

MOST_WAITS = 3  # A submission gets as much time as this many exercises that never end.
NOT_TRIED = "not graded, because earlier exercises used all of this submission's time"
BUSIER = 1.5  # An exercise gets longer deadlines only if they are at least this many times as long.
KILLED_FROM = 128  # An exit status above this one stands for a signal.
READING = {"seconds_each": scaled(30.0), "memory_bytes": 1_500_000_000, "process_memory_bytes": 1_500_000_000}
_MAGIC_LINE = re.compile(r"^([ \t]*)[%!?].*", re.MULTILINE)
TOOK_DOWN = "the code crashed the processes that grade it"


class NotGraded(RuntimeError):
    """There is no record yet, and the cause is not the student's code."""


def grade(submission: Submission, course: Course, limits: Limits, known: Sequence[Answer] = ()) -> Record:
    """Return the record of a submission, whatever was handed in.

    Args:
        known: Answers that are kept as they are.

    Raises:
        NotGraded: if this machine failed, and not the student's code.
    """
    began = time.monotonic()
    digest, notebook = digest_of(submission, course.digest), digest_of(submission, "")
    record = Record(submission.student, submission.lab, digest, [], notebook=notebook)
    answers: dict[str, Answer] = {}
    added: dict[str, list[str]] = {}
    try:
        cells = _read(submission, course, limits)
        grading = Grading(cells, course, limits, record, {answer.name: answer for answer in known})
        files = submissions.other_files(submission)
        record.notes = [f"Only the notebook is graded, so {name} was not used." for name in files]
        repeated = submissions.repeated_exercises(cells)
        numbers = _numbers(course)
        record.notes += [
            f"Exercise {numbers[name]} is in several cells, which were run one after the other."
            for name in repeated
            if name in numbers
        ]
        answers, added = grading.answers(), grading.added
    except Unreadable as error:
        record.reason = str(error)
    for task in course.tasks:
        answer = answers.get(task.name) or _answer(task, [], record.reason or NOT_TRIED)
        record.answers.append(replace(answer, cells=[*task.cells, *added.get(task.name, ())]))
    record.seconds = round(time.monotonic() - began, 1)
    return record


def _read(submission: Submission, course: Course, limits: Limits) -> list[dict]:
    """Return the notebook's code cells, which are read inside the sandbox.

    Raises:
        Unreadable: if there is no readable notebook.
    """
    file = submissions.opened(submission)
    try:
        ended = sandbox.run("instructor.grade.reader", {}, course.folder, replace(limits, **READING), file)
    finally:
        os.close(file)
    _check_started(ended)
    answer = ended.lines[-1]
    if answer == sandbox.READY:
        raise Unreadable(f"the notebook could not be read: {ended.why or 'it needs too much memory'}")
    if "unreadable" in answer:
        raise Unreadable(answer["unreadable"])
    return answer["cells"]


class Grading:
    """Grades one notebook that could be read."""

    def __init__(
        self, cells: list[dict], course: Course, limits: Limits, record: Record, known: dict[str, Answer] | None = None
    ):
        self.cells, self.course, self.limits, self.record, self.known = cells, course, limits, record, known or {}
        self.time_scale = machine_load.time_scale(len(sandbox.running))
        self.deadline = self._deadline()
        self.pieces = submissions.pieces_of(cells, course.chapter)
        self.others = submissions.other_cells(cells)
        self.added: dict[str, list[str]] = {}  # by task, the names of what it uses from other cells
        self.names = [
            (static_checks.lends(piece["source"]), static_checks.used_by(piece["source"])) for piece in self.pieces
        ]
        own = [piece for piece in self.pieces if piece["grade_id"]]
        record.code = assembly.code_of(own)
        self.blank = [name for name, stub in course.stubs.items() if record.code.get(name, "").strip() == stub.strip()]
        given = [piece["source"] for piece in self.pieces if not piece["grade_id"]]
        self.given = {name for source in given for name in mine.names_in(source)}
        others = self.others if self.blank else []
        self.elsewhere = {name for other in others for name in _defined_in(other["source"])}  # answers in other cells

    def answers(self) -> dict[str, Answer]:
        """Return the answers by the names of their tasks."""
        asked = [task for task in self.course.tasks if task.name not in self.known]
        unanswered = [task for task in asked if self._is_unanswered(task)]
        answers = self.known | {task.name: _answer(task, [], UNANSWERED) for task in unanswered}
        answers |= self._judged([task for task in asked if task not in unanswered], self.pieces)
        answers |= self._with_more_time(answers)
        if not any(answer.reason.startswith("void") for answer in answers.values()):
            answers |= self._second_chances(answers)
        return answers

    def _deadline(self) -> float:
        longer = self.time_scale / deadlines.time_scale()
        return time.monotonic() + MOST_WAITS * self.limits.seconds_each * longer

    def _with_more_time(self, answers: dict[str, Answer]) -> dict[str, Answer]:
        """Judge exercises again that a deadline ended, if the machine has become busier since the deadline was chosen.

        Returns their answers.
        """
        late = [task for task in self.course.tasks if task.name in answers and _ran_out(answers[task.name])]
        late = [task for task in late if task.name not in self.known]
        time_scale = machine_load.time_scale(len(sandbox.running)) if late else 0.0
        if time_scale < BUSIER * self.time_scale:
            return {}
        self.time_scale = time_scale
        self.deadline = self._deadline()
        return self._judged(late, self.pieces)

    def _is_unanswered(self, task: Task) -> bool:
        """Return whether the student left all cells of a task as they were, and wrote the answer in no other cell."""
        if not {*task.cells} <= {*self.blank}:
            return False
        return not self.elsewhere.intersection(self._names_of(task))

    def _names_of(self, task: Task) -> list[str]:
        """Return the names that students define in a task's cells."""
        return sorted({name for cell in task.cells for name in mine.names_in(self.course.stubs[cell])} - self.given)

    def _second_chances(self, answers: dict[str, Answer]) -> dict[str, Answer]:
        """Judge exercises again that use earlier ones that were wrong, with our own code for the earlier ones.

        Our code replaces an earlier exercise only if our own solution of the later one uses it, too. Otherwise, code
        that only calls our code under another name could pass.

        Returns the answers that earn more points in this way.
        """
        better: dict[str, Answer] = {}
        failed = [task for task in self.course.tasks if task.name in answers and _lost(answers[task.name])]
        replaced: list[Task] = []
        while failed and time.monotonic() < self.deadline:
            replaced.append(failed.pop(0))
            for helpers, tasks in self._by_helpers(failed, replaced, answers):
                ours = {name: self.course.ours[name] for helper in helpers for name in helper.cells}
                pieces = submissions.pieces_of(self.cells, self.course.chapter, ours)
                for name, answer in self._judged(tasks, pieces).items():
                    if answer.points > max(answers[name].points, better[name].points if name in better else 0):
                        better[name] = replace(answer, replaced_by_ours=[helper.number for helper in helpers])
            failed = [task for task in failed if task.name not in better or _lost(better[task.name])]
        return better

    def _by_helpers(
        self, failed: list[Task], replaced: list[Task], answers: dict[str, Answer]
    ) -> list[tuple[list[Task], list[Task]]]:
        """Group the failed tasks that may use the last one that was replaced, by the replaced tasks that they may use.

        Returns for each group the replaced tasks, and the tasks to judge with them.
        """
        groups: dict[tuple[str, ...], tuple[list[Task], list[Task]]] = {}
        for task in failed:
            helpers = [helper for helper in replaced if self._may_use(task, helper)]
            last = replaced[-1:] == helpers[-1:]
            if last and answers[task.name].reason != UNANSWERED and self._uses(task, helpers):
                groups.setdefault(tuple(helper.name for helper in helpers), (helpers, []))[1].append(task)
        return list(groups.values())

    def _may_use(self, task: Task, helper: Task) -> bool:
        """Return whether our own solution of a task uses another one, and the two share no cell."""
        used = {name for own in task.cells for name in self.course.uses[own]}
        return bool(used & {*helper.cells}) and task.name not in self.known and not {*task.cells} & {*helper.cells}

    def _uses(self, task: Task, helpers: list[Task]) -> bool:
        """Return whether a task's code uses a name from our code for these helpers, directly or through other cells."""
        ours = [self.course.ours[name] for helper in helpers for name in helper.cells]
        cells = [*task.cells, *self.added.get(task.name, ())]
        wanted = {name for own in cells for name in static_checks.used_by(self.record.code.get(own, ""))}
        for _ in self.names:  # One more cell is followed in each round.
            wanted = wanted.union(*(used for lent, used in self.names if lent & wanted))
        return any(static_checks.lends(source) & wanted for source in ours)

    def _judged(self, tasks: list[Task], pieces: list[dict]) -> dict[str, Answer]:
        """Return the answers of these tasks by name."""
        answers: dict[str, Answer] = {}
        left = list(tasks)
        while left and time.monotonic() < self.deadline:
            ended = sandbox.run(
                "instructor.grade.judge",
                self._job(left, pieces),
                self.course.folder,
                self.limits,
                time_scale=self.time_scale,
            )
            _check_started(ended)
            if not ended.bounded:
                self._note({"notes": [cgroup.MISSING]})
            why = ended.why or ended.ran_out or _last_words(ended)
            begun = None
            for line in ended.lines:
                self._note(line)
                begun = line.get("begin", begun)
                if "failed" in line:
                    raise NotGraded(line["failed"])
                if "done" in line:
                    (task,) = (task for task in left if task.name == line["done"])
                    verdicts = verdicts_from(line["verdicts"])
                    reason = line["reason"] or (ended.ran_out if _lost_a_rank(verdicts) else "")
                    answers[task.name] = _answer(task, verdicts, reason)
                    left.remove(task)
                if "broken" in line and not ended.ran_out:
                    why = f"{TOOK_DOWN}: {line['reason']}"
            if not left:
                break
            if begun is None:  # The cells could not be loaded, so another judge would fail in the same way.
                return answers | {task.name: _answer(task, [], f"while the cells were loaded, {why}") for task in left}
            crashed_task = left.pop(0)
            answers[crashed_task.name] = _answer(crashed_task, [], why)
        return answers

    def _job(self, tasks: list[Task], pieces: list[dict]) -> dict:
        places = {name: f"exercise {number}" for name, number in _numbers(self.course).items()}
        after = "a cell after the last exercise"
        beside = {name: f"a cell before {place}" for name, place in places.items()}
        return {
            "module": module_of(self.course.chapter),
            "cells": [piece | {"place": places.get(piece["grade_id"])} for piece in pieces],
            "others": [other | {"place": beside.get(other["before"], after)} for other in self.others],
            "blank": self.blank,
            "forbidden": self.course.withheld,
            "ready_made": self.course.ready_made,
            "tasks": [{"name": task.name, "cells": task.cells, "names": self._names_of(task)} for task in tasks],
        }

    def _note(self, line: dict) -> None:
        """Keep what a judge says about the whole notebook."""
        new = [notice for notice in line.get("notices", []) if notice not in self.record.notices]
        self.record.notices = [*self.record.notices, *new]
        self.record.notes += [note for note in line.get("notes", []) if note not in self.record.notes]
        for name, code in line.get("added", {}).items():
            self.added[name] = [*code]
            self.record.code |= code


def _defined_in(source: str) -> set[str]:
    """Return the names that a cell defines. Its magics are not translated here, only left out."""
    try:
        return mine.names_in(_MAGIC_LINE.sub(r"\1pass", source))
    except static_checks.NOT_CODE:
        return set()


def _numbers(course: Course) -> dict[str, str]:
    """Return the number of each cell's exercise, by its grade_id. Students do not see a grade_id."""
    return {name: task.number for task in reversed(course.tasks) for name in task.cells}


def _check_started(ended: sandbox.Ended) -> None:
    """Check that a program began its work, and that nobody stopped the grader.

    Raises:
        NotGraded: if not, since this is not the student's fault.
    """
    if ended.why == sandbox.STOPPED:
        raise NotGraded(sandbox.STOPPED)
    if sandbox.READY not in ended.lines:
        raise NotGraded(f"the judge did not start: {ended.why or ended.printed.strip()[-500:] or ended.status}")


def _ran_out(answer: Answer) -> bool:
    return _lost(answer) and machine_load.ran_out_of_time([answer.reason, *(each.evidence for each in answer.verdicts)])


def _lost_a_rank(verdicts: list[Verdict]) -> bool:
    return any(KILLED in verdict.evidence for verdict in verdicts)


def _lost(answer: Answer) -> bool:
    return answer.points < answer.max_points


def _answer(task: Task, verdicts: list[Verdict], reason: str) -> Answer:
    points = 0.0 if reason else credit(task.points, verdicts)
    return Answer(task.number, task.name, points, task.points, verdicts, reason)


def _last_words(ended: sandbox.Ended) -> str:
    if ended.status is None or ended.status > KILLED_FROM or ended.status < 0:
        return f"{TOOK_DOWN}: they were killed from inside the sandbox"
    printed = ended.printed.strip().splitlines()
    last_line = f"and last printed: {printed[-1][:200]}" if printed else "and printed nothing"
    return f"{TOOK_DOWN}: they ended with exit status {ended.status} {last_line}"
