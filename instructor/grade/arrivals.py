"""Sort a zip file from Canvas, Moodle or Gradescope into folders: `python -m instructor.grade.arrivals ZIP`.

Writes submissions/<student>/<lab>/<lab>.ipynb, which `make grade` reads, and timestamp.txt beside it if the zip file
says when the notebook was handed in. The platform's own number of a student is part of the folder's name, so that
`python -m instructor.grade.export` can write the points back. The names in the zip file show which platform it is from:

    Canvas      <name>[_LATE]_<user>_<submission>_<file>.ipynb
    Moodle      <name>_<participant>_assignsubmission_file/<file>.ipynb
    Gradescope  .../submission_<number>/<file>.ipynb, and submission_metadata.yml

Canvas and Moodle do not say when a notebook was handed in. A student who handed in files but no notebook gets an empty
folder, and thus a row in the tables.

Everything in the zip file may come from a student. So paths cannot leave the folder, links are not followed, and a file
that exceeds the size limit for notebooks is left out.
"""

import argparse
import re
import stat
import sys
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import yaml

from instructor.build import ROOT, Chapter, chapters
from instructor.grade.policy import TIMESTAMP
from instructor.grade.records import one_line
from instructor.grade.submissions import MOST_BYTES
from instructor.release import number_of

FOLDER = ROOT / "submissions"
CANVAS = re.compile(r"(?P<name>[^_/]+)_(?P<late>LATE_)?(?P<id>\d+)_\d+_(?P<file>[^/]+)$", re.IGNORECASE)
MOODLE = re.compile(r"(?P<name>[^_/]+)_(?P<id>\d+)_assignsubmission_\w+/(?:.*/)?(?P<file>[^/]+)$", re.IGNORECASE)
GRADESCOPE = re.compile(r"(?P<folder>submission_(?P<id>\d+))/(?:.*/)?(?P<file>[^/]+)$", re.IGNORECASE)
METADATA = "submission_metadata.yml"
IGNORED = re.compile(r"(^|/)(__MACOSX(/|$)|\._|\.ipynb_checkpoints)")
UNSAFE = re.compile(r"[^\w .,@+-]")


class NotAnArchive(ValueError):
    """A file cannot be sorted into folders; the message says why."""


@dataclass(frozen=True)
class Arrival:
    """A file that a student handed in, in a zip file."""

    member: zipfile.ZipInfo
    student: str  # the name of the folder
    file: str
    when: str = ""  # in the format of ISO 8601, if the zip file says it
    late: bool = False  # according to Canvas, which does not say how late

    @property
    def is_notebook(self) -> bool:
        return self.file.lower().endswith(".ipynb")

    def __str__(self):
        return one_line(self.member.filename)


def unpack(archive: Path, folder: Path, lab: Chapter | None = None) -> tuple[list[Path], list[str]]:
    """Write the notebooks of a zip file into folders. Returns them, and what an instructor should know, in sentences.

    If a student handed in several notebooks for a lab, the one that comes last in the zip file counts.

    Args:
        lab: The lab that all notebooks are for. With None, each file's name tells its lab.

    Raises:
        NotAnArchive: if nothing in this file can be attributed to a student.
    """
    written: dict[Path, Arrival] = {}
    remarks: list[str] = []
    try:
        with zipfile.ZipFile(archive) as opened:
            arrived = list(_arrivals(opened))
            for arrival in arrived:
                if not arrival.is_notebook:
                    continue
                chapter = lab or _lab_of(arrival.file)
                if why := _unusable(arrival, chapter):
                    remarks.append(f"{arrival} was left out, because it {why}")
                    continue
                path = _write(opened, arrival, folder / arrival.student / chapter.name, chapter)
                if path in written:
                    remarks.append(f"{arrival} is graded instead of {written[path]}")
                written[path] = arrival
    except (zipfile.BadZipFile, OSError, yaml.YAMLError) as error:
        raise NotAnArchive(f"{archive.name} cannot be read: {error}") from None
    if not arrived:
        raise NotAnArchive(f"{archive.name} has no file that is named as Canvas, Moodle or Gradescope name them")
    for student, files in _without_notebook(arrived).items():
        (folder / student).mkdir(parents=True, exist_ok=True)
        remarks.append(f"{student} handed in no notebook, but {', '.join(files)}")
    undated = _without_time(written)
    if late := [f"{path.parent / TIMESTAMP}" for path, arrival in written.items() if arrival.late and path in undated]:
        stamps = " and ".join(late)
        remarks.append(f"some notebooks are late, but Canvas does not say how late: write the time into {stamps}")
    return list(written), remarks


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


def _unusable(arrival: Arrival, chapter: Chapter | None) -> str:
    """Return why a notebook cannot be used, or ""."""
    if chapter is None:
        return "is not named like a lab; set its chapter with an option such as --chapter 04"
    if arrival.member.file_size > MOST_BYTES:
        return f"is larger than {MOST_BYTES // 1_000_000} MB"
    return "is a link" if stat.S_ISLNK(arrival.member.external_attr >> 16) else ""


def _without_notebook(arrived: list[Arrival]) -> dict[str, list[str]]:
    """Return the files of the students who handed in no notebook at all."""
    files: dict[str, list[str]] = {}
    for arrival in arrived:
        files.setdefault(arrival.student, []).append(str(arrival))
    with_notebook = {arrival.student for arrival in arrived if arrival.is_notebook}
    return {student: own for student, own in files.items() if student not in with_notebook}


def _arrivals(archive: zipfile.ZipFile) -> Iterator[Arrival]:
    """List all files that a student handed in, without those that an editor or macOS put beside them."""
    members = {member: member.filename.replace("\\", "/") for member in archive.infolist()}
    members = {member: name for member, name in members.items() if not IGNORED.search(name)}
    metadata = _metadata_of_gradescope(members)
    submitters = _submitters(archive, metadata) if metadata else {}
    for member, name in members.items():
        if metadata is None and (found := MOODLE.search(name)):
            yield Arrival(member, _folder_of(found["name"], found["id"]), found["file"])
        elif found := GRADESCOPE.search(name):
            student, when = submitters.get(found["folder"], ("student", ""))
            yield Arrival(member, _folder_of(student, found["id"]), found["file"], when)
        elif found := CANVAS.search(PurePosixPath(name).name):
            yield Arrival(member, _folder_of(found["name"], found["id"]), found["file"], late=bool(found["late"]))


def _metadata_of_gradescope(members: dict[zipfile.ZipInfo, str]) -> zipfile.ZipInfo | None:
    """Return the file in which Gradescope says who handed in each folder, or None if the zip file is not Gradescope's.

    This file is beside the students' folders. Students can upload a file with the same name, but it is inside a folder.
    """
    for member, name in members.items():
        path = PurePosixPath(name)
        beside = str(path.parent / "x")[:-1]
        if path.name == METADATA and all(other.startswith(beside) for other in members.values()):
            return member
    return None


def _submitters(archive: zipfile.ZipFile, metadata: zipfile.ZipInfo) -> dict[str, tuple[str, str]]:
    """Return who handed in each of Gradescope's folders, and when."""
    if metadata.file_size > MOST_BYTES:
        return {}
    content = yaml.safe_load(archive.read(metadata))
    found = {}
    for folder, about in content.items() if isinstance(content, dict) else ():
        people = about.get(":submitters") or [{}] if isinstance(about, dict) else [{}]
        name = str(people[0].get(":name") or people[0].get(":email") or "student")
        found[str(folder)] = (name, str(about.get(":created_at", "")) if isinstance(about, dict) else "")
    return found


def _folder_of(name: str, number: str) -> str:
    """Return a student's folder: the name without anything that has a meaning in paths, and the platform's number."""
    return f"{UNSAFE.sub('', name).strip(' .')[:80] or 'student'}_{number}"


def _lab_of(file: str) -> Chapter | None:
    return next((chapter for chapter in chapters() if file.startswith(chapter.name)), None)


def _write(archive: zipfile.ZipFile, arrival: Arrival, folder: Path, chapter: Chapter) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{chapter.name}.ipynb"
    with archive.open(arrival.member) as packed:
        content = packed.read(MOST_BYTES + 1)  # The size in the header could be wrong.
    if not path.exists() or path.read_bytes() != content:
        path.write_bytes(content)
        (folder / TIMESTAMP).unlink(missing_ok=True)  # It was an earlier notebook's.
    if arrival.when:
        (folder / TIMESTAMP).write_text(arrival.when)
    return path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m instructor.grade.arrivals", description=__doc__.splitlines()[0])
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
        print(f"Notebooks written to {options.into} from {archive.name}: {len(written)}")
        for remark in filter(None, [*remarks, about_times(written)]):
            print(f"  {remark}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
