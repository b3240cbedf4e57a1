"""Write everything that a run produces: records, and the tables and pages made from them and from the policy."""

import hashlib
import os
import secrets
import unicodedata
import urllib.parse
from dataclasses import replace
from pathlib import Path

from instructor.grade import dashboard, finding, gradebook, records
from instructor.grade.dashboard import Alike
from instructor.grade.policy import Policy, undated
from instructor.grade.records import UNANSWERED, Record, counted, notebook_of, write_whole
from instructor.grade.submissions import Submission
from instructor.grade.tasks import essential_of
from shared.checks.engine.display import shorten_repeated_evidence, sign
from shared.tables import render

ANONYMOUS = "anonymous"  # the folder with pages and tables that name no student


class Outputs:
    """The records of a run, and the folder with all that is made from them."""

    def __init__(self, folder: Path, policy: Policy, anonymous: bool = False):
        self.folder, self.policy, self.anonymous = folder, policy, anonymous
        self.records: dict[tuple[str, str], Record] = {}
        self._handed_in: dict[tuple[str, str], Submission] = {}
        self._alike: dict[str, list[Alike]] = {}  # by lab, once all submissions are graded

    def add(self, record: Record, submission: Submission) -> None:
        """Keep a record, whose pages are up to date or are written at the end."""
        self.records[record.student, record.lab] = record
        self._handed_in[record.student, record.lab] = submission

    def save(self, record: Record, submission: Submission) -> Record:
        """Write a new record completely, then its pages and all tables. Returns it with the instructor's decisions."""
        self.add(record, submission)
        if record.final:
            records.save(record, self.folder)
        decided = self._decided(record)
        self._write_pages(decided, self.folder)
        self.write_tables()
        return decided

    def decided(self) -> list[Record]:
        """Return all records with the instructor's decisions, sorted by student and lab."""
        students = {student for student, _ in self.records}
        everything = []
        for _, record in sorted(self.records.items()):
            others = sorted(students - {record.student})
            namesakes = [student for student in others if _normalized(student) == _normalized(record.student)]
            same_name = [f"{student} has the same name except for case or Unicode form" for student in namesakes]
            decided = self._decided(record)
            copies = [group.about(record.student, self.policy.names) for group in self._alike.get(record.lab, [])]
            everything.append(replace(decided, notices=[*decided.notices, *same_name, *filter(None, copies)]))
        return everything

    def write_tables(self, complete: bool = False) -> list[Record]:
        """Write the tables and the index of all records, and return the records.

        Args:
            complete: Whether these are the records of all submissions, and there is a dashboard.
        """
        everything = self.decided()
        gradebook.write(everything, self.folder, self.policy)
        write_index(everything, self.folder, complete)
        return everything

    def write_all(self) -> list[Record]:
        """Write all tables and pages again, since the instructor's decisions may have changed."""
        everything = self.decided()
        self._alike = dashboard.alike_by_lab(everything)
        for record in everything:
            self._write_pages(record, self.folder)
        written = self.write_tables(complete=True)
        dashboard.write(everything, self.folder, self._alike)
        if self.anonymous or (self.folder / ANONYMOUS).exists():  # otherwise, an earlier run's would be out of date
            self._write_anonymous(everything)
        return written

    def _decided(self, record: Record) -> Record:
        submission = self._handed_in.get((record.student, record.lab))
        return with_arrival(self.policy.applied(record, submission), submission)

    def _write_pages(self, record: Record, folder: Path) -> None:
        write_page(record, folder)
        gradebook.write_gradescope(record, folder)

    def _write_anonymous(self, everything: list[Record]) -> None:
        """Write pages and tables with a code for each student, which is the same in every run, and a key to the codes.

        Names in students' code and in error messages cannot be found safely, so they stay. The index says so.
        """
        salt_file = self.folder / ".salt"
        if not salt_file.exists():
            records.write_whole(salt_file, secrets.token_hex(16))
        salt = salt_file.read_text(encoding="utf-8")
        names = sorted({record.student for record in everything})
        codes = {name: f"student-{_digest(salt + name)}" for name in names}
        folder = self.folder / ANONYMOUS
        coded = sorted((replace(record, student=codes[record.student], name="", notices=[]) for record in everything),
                       key=lambda record: (record.student, record.lab))  # fmt: skip
        for record in coded:
            write_page(record, folder)
        gradebook.write(coded, folder, self.policy)
        write_index(coded, folder, anonymous=True)
        dashboard.write(coded, folder)
        gradebook.write_table(self.folder / "anonymous-key.csv", ("code", "student"), [(codes[n], n) for n in names])


def with_arrival(record: Record, submission: Submission | None) -> Record:
    """Return a record that also says which notebook was chosen, and whether the platform calls it late."""
    if submission is None:
        return record
    note = finding.note_of(submission)
    choices = [choice for choice in (note.choice, submission.choice) if choice]
    late = [f"{note.platform} marks this as late"] if note.late and not record.late else []
    return replace(record, notes=[*choices, *record.notes], notices=[*late, *choices, *record.notices])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:8]


def _normalized(name: str) -> str:
    return unicodedata.normalize("NFKC", name).casefold()


def write_page(record: Record, folder: Path) -> None:
    """Write feedback/<student>/<lab>.html. Everything that a student wrote is escaped and shown as text."""
    page = render(
        __package__,
        "feedback.html",
        record=record,
        shorten_repeated_evidence=shorten_repeated_evidence,
        sign=sign,
        points=_points,
        counted=counted,
        notebook_of=notebook_of,
        numbered=_numbered,
        essential_of=essential_of,
        unanswered=UNANSWERED,
    )
    write_whole(folder / "feedback" / record.student / f"{record.lab}.html", page)


def write_index(records: list[Record], folder: Path, complete: bool = True, anonymous: bool = False) -> None:
    """Write index.html, an overview of all records.

    Args:
        complete: False while grading goes on.
        anonymous: Whether the students' names are codes. If so, the page lacks what only the instructor should see.
    """
    page = render(
        __package__,
        "index.html",
        records=records,
        students=len({record.student for record in records}),
        points=_points,
        quoted=_quoted,
        undated=undated(records),
        complete=complete,
        anonymous=anonymous,
    )
    write_whole(folder / "index.html", page)


def _quoted(name: str) -> str:
    """Quote a folder's name for a link. The name may come from an old system and not be valid UTF-8."""
    return urllib.parse.quote(os.fsencode(name), safe="")


def _numbered(code: str) -> list[tuple[int, str]]:
    """Return the lines of some code with their numbers, from the first one that is not empty."""
    empty = len(code) - len(code.lstrip("\n"))
    return list(enumerate(code.split("\n"), 1))[empty:]


def _points(points: float) -> str:
    return f"{points:g}"
