"""Sort a zip file from Canvas, Moodle or Gradescope into folders: `python -m instructor.grade.lms_zips ZIP`.

A folder does as well, because some browsers unpack what they download. Writes submissions/<student>/<lab>/<lab>.ipynb,
which `make grade` reads. Beside it are arrival.json, which says what the platform said about the notebook, and
timestamp.txt if the platform says when it was handed in. The platform's own number of a student is part of the folder's
name, so that `python -m instructor.grade.export` can write the points back. platforms.py knows how the platforms name
files.

Canvas and Moodle do not say when a notebook was handed in. A student who handed in files but no notebook gets an empty
folder, and thus a row in the tables. So does every member of a group on Gradescope.

Everything in the zip file may come from a student. So paths cannot leave the folder, links are not followed, and a file
that exceeds the size limit for notebooks is left out.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from instructor.build import ROOT, Chapter, chapters
from instructor.grade import archives, choice, platforms
from instructor.grade.archives import Damaged, NotAnArchive
from instructor.grade.choice import Kind, Notebook
from instructor.grade.finding import Note
from instructor.grade.platforms import Arrival
from instructor.grade.records import one_line
from instructor.grade.submissions import ANONYMOUS, TIMESTAMP
from instructor.release import number_of
from shared.checks.terminal import show_anything

FOLDER = ROOT / "submissions"


@dataclass
class Sorted:
    """What became of the files of one download."""

    folder: Path
    lab: Chapter | None
    written: dict[Path, Arrival] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def sort(self, student: str, own: list[Arrival]) -> None:
        """Write a student's best notebook for each lab. Nobody gets a notebook replaced by one that nobody edited."""
        (self.folder / student).mkdir(parents=True, exist_ok=True)
        remarks_before = len(self.remarks)
        of_labs: dict[str, list[tuple[Arrival, Notebook]]] = {}
        for arrival in (arrival for arrival in own if arrival.is_notebook):
            try:
                data = arrival.member.read()
            except Damaged as why:
                self.remarks.append(f"{arrival} was left out, because it {why}")
                continue
            chapter = _lab_of(arrival.file, data, self.lab)
            if chapter is not None:
                notebook = Notebook(one_line(arrival.path), data, arrival.member.when)
                of_labs.setdefault(chapter.name, []).append((arrival, notebook))
            elif self.lab is None:
                why = "is not named like a lab; set its chapter with an option such as --chapter 04"
                self.remarks.append(f"{arrival} was left out, because it {why}")
        if not of_labs and len(self.remarks) == remarks_before:
            what = "notebook" if self.lab is None else f"notebook of {self.lab.name}"
            self.remarks.append(f"{student} handed in no {what}, but {', '.join(map(str, own))}")
        self._write_best(student, of_labs)

    def _write_best(self, student: str, of_labs: dict[str, list[tuple[Arrival, Notebook]]]) -> None:
        chosen = {lab: choice.choose([each for _, each in found], Chapter(lab)) for lab, found in of_labs.items()}
        worked = any(each.kind is not None and each.kind > Kind.UNTOUCHED for each in chosen.values())
        for lab, best in chosen.items():
            arrival = next((arrival for arrival, notebook in of_labs[lab] if notebook is best.notebook), None)
            path = self.folder / student / lab / f"{lab}.ipynb"
            if arrival is None or best.notebook is None or best.kind is None:
                continue
            if best.kind <= Kind.UNTOUCHED and (worked or path.exists()):
                self.remarks.append(f"{arrival} was left out, because it is {choice.LABELS[best.kind]}")
            else:
                self._write(arrival, best.notebook, best.sentence, path)
        if of_labs and not any(each.notebook for each in chosen.values()):
            names = ", ".join(f"{other.name} ({why})" for each in chosen.values() for other, why in each.others)
            self.remarks.append(f"{student} handed in no lab, but {names}")

    def _write(self, arrival: Arrival, notebook: Notebook, sentence: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        stamp = path.parent / TIMESTAMP
        if not path.exists() or path.read_bytes() != notebook.data:
            path.write_bytes(notebook.data)
            stamp.unlink(missing_ok=True)  # It was an earlier notebook's.
        if arrival.when:
            stamp.write_text(arrival.when, encoding="utf-8")
        Note(arrival.platform, arrival.returns, arrival.late, sentence).write(path.parent)
        self.written[path] = arrival
        if sentence:
            self.remarks.append(f"{arrival.student}: {sentence.rstrip('.')}")


def unpack(archive: Path, folder: Path, lab: Chapter | None = None) -> tuple[list[Path], list[str]]:
    """Write the notebooks of a download into folders. Returns them, and what an instructor should know, in sentences.

    Args:
        lab: The lab that all notebooks are for. With None, each file's name or content tells its lab.

    Raises:
        NotAnArchive: if nothing in this file can be attributed to a student.
    """
    found = Sorted(folder, lab)
    with archives.opened(archive) as members:
        arrived = list(platforms.arrivals_in(members, found.remarks))
        for student, own in itertools.groupby(sorted(arrived, key=_student), _student):
            _sort_with_zips(found, student, list(own))
    if not arrived:
        raise NotAnArchive(f"{archive.name} has no file that is named as Canvas, Moodle or Gradescope name them")
    anonymous = sorted({arrival.student for arrival in arrived if arrival.student.startswith(ANONYMOUS)})
    if anonymous:
        found.remarks.append(f"Canvas hides these students' numbers, so no points can be written back for them: "
                             f"{', '.join(anonymous)}")  # fmt: skip
    undated = _without_time(found.written)
    if late := [f"{path.parent / TIMESTAMP}" for path, one in found.written.items() if one.late and path in undated]:
        stamps = " and ".join(late)
        found.remarks.append(f"some notebooks are late, but Canvas does not say how late: write the time into {stamps}")
    return list(found.written), found.remarks


def _student(arrival: Arrival) -> str:
    return arrival.student


def _sort_with_zips(found: Sorted, student: str, own: list[Arrival]) -> None:
    """Sort a student's files. If there is no notebook among them, look into a zip file that the student handed in."""
    zipped = [arrival for arrival in own if arrival.file.lower().endswith(".zip")]
    if any(arrival.is_notebook for arrival in own) or not zipped:
        return found.sort(student, own)
    with archives.inside(zipped[-1].member) as members:
        last = zipped[-1]
        files = [member for member in members if not platforms.IGNORED.search(member.name)]
        inner = [replace(last, member=member, path=member.name) for member in files]
        found.sort(student, inner if any(arrival.is_notebook for arrival in inner) else own)


def _without_time(written: Iterable[Path]) -> list[Path]:
    """Return the notebooks for which it is unknown when they were handed in."""
    return [path for path in written if not (path.parent / TIMESTAMP).exists()]


def about_times(written: list[Path]) -> str:
    """Return a sentence about the notebooks for which it is unknown when they were handed in, or ""."""
    undated = _without_time(written)
    if not undated:
        return ""
    named = f"the notebooks of {', '.join(path.parent.parent.name for path in undated)}"
    whose = "any notebook" if len(undated) == len(written) else named
    return (
        f"There is no {TIMESTAMP} beside {whose}. If you set a deadline, write into this file when the notebook was "
        "handed in, such as 2026-12-01T22:00:00+01:00."
    )


def _lab_of(file: str, data: bytes, lab: Chapter | None) -> Chapter | None:
    """Return the lab that a notebook is for, according to its name or else its exercises, or None.

    Args:
        lab: The lab that all notebooks are for. Only a notebook of another lab is not for it.
    """
    named = next((chapter for chapter in chapters() if file.startswith(chapter.name)), None)
    if lab is None:
        return named or choice.lab_in(data)
    return lab if named in (None, lab) or choice.lab_in(data) == lab else None


def main() -> int:
    show_anything()
    parser = argparse.ArgumentParser(
        prog="python -m instructor.grade.lms_zips", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("zip", type=Path, nargs="+", help="what Canvas, Moodle or Gradescope offers for download")
    parser.add_argument("--into", type=Path, default=FOLDER, help="default: submissions")
    parser.add_argument("--chapter", type=int, help="such as 04; default: what each file's name says")
    options = parser.parse_args()
    lab = next((chapter for chapter in chapters() if number_of(chapter) == options.chapter), None)
    if options.chapter is not None and lab is None:
        parser.error(f"there is no chapter {options.chapter:02d}")
    for archive in options.zip:
        try:
            written, remarks = unpack(archive, options.into, lab)
        except NotAnArchive as error:
            parser.error(str(error))
        except OSError as error:
            parser.error(f"not all notebooks were written ({error.strerror}: {error.filename or options.into})")
        print(f"Notebooks written to {options.into} from {archive.name}: {len(written)}")
        for remark in filter(None, [*remarks, about_times(written)]):
            print(f"  {remark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
