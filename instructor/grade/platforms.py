"""Tell from the names that Canvas, Moodle and Gradescope give to files who handed in what.

    Canvas      <name>[_LATE]_<user>_<attachment>_<file>, or [LATE_]anon_<code>_<attachment>_<file>
    Moodle      <name>_<participant>_assignsubmission_file/<file>, or _<file> instead of /<file>
    Gradescope  .../submission_<number>/<file>, and submission_metadata.yml

Sources: `lib/content_zipper.rb` of Canvas, mod/assign/locallib.php of Moodle, and Gradescope's exports.
"""

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import yaml

from instructor.build import chapters
from instructor.grade.archives import Damaged, Member
from instructor.grade.records import one_line
from instructor.grade.submissions import ANONYMOUS

HIDDEN = re.compile(r"(?P<late>LATE_)?anon_(?P<code>[^\W_]+)_\d+_(?P<file>.+)$")
LATE = re.compile(r"(?P<name>.+)_LATE_(?P<id>\d+)_\d+_(?P<file>.+)$")
TWO_NUMBERS = re.compile(r"(?=_(\d+)_(\d+)_(.+)$)")  # It consumes nothing, so matches may overlap.
MOODLE = re.compile(r"(?P<name>[^_/]+)_(?P<id>\d+)_assignsubmission_(?:\w*?/|file_)(?P<path>.+)$", re.IGNORECASE)
GRADESCOPE = re.compile(r"(?P<folder>submission_(?P<id>\d+))/(?P<path>.+)$", re.IGNORECASE)
METADATA = "submission_metadata.yml"
IGNORED = re.compile(r"(^|/)(__MACOSX(/|$)|\._|\.DS_Store$|\.ipynb_checkpoints)")
JOINERS = "\u200c\u200d"  # They have no width, but belong to the spelling of some scripts.
MOST_NAME_BYTES = 150  # A file system allows 255.


@dataclass(frozen=True)
class Arrival:
    """A file that a student handed in."""

    member: Member
    student: str  # the name of the folder
    path: str  # as the student knows it
    platform: str
    returns: str = ""  # how the name of a file of feedback must begin
    when: str = ""  # in the format of ISO 8601, if the platform says it
    late: bool = False  # according to Canvas, which does not say how late

    @property
    def file(self) -> str:
        return PurePosixPath(self.path).name

    @property
    def is_notebook(self) -> bool:
        return self.file.lower().endswith(".ipynb")

    def __str__(self):
        return one_line(self.member.name)


def looks_like_a_download(folder: Path) -> bool:
    """Return whether a folder has the names that a platform gives, and so has not been sorted yet."""
    inside = list(folder.iterdir())
    names = [f"{path.name}/x" if path.is_dir() else path.name for path in inside]
    of_canvas = any(_of_canvas(path.name) for path in inside if path.suffix.lower() == ".ipynb")
    return of_canvas or any(MOODLE.search(name) or GRADESCOPE.search(name) for name in names)


def arrivals_in(members: list[Member], remarks: list[str]) -> Iterator[Arrival]:
    """List all files that a student handed in, without those that an editor or macOS put beside them."""
    members = [member for member in members if not IGNORED.search(member.name)]
    metadata = _metadata_of_gradescope(members)
    submitters = _submitters(metadata, remarks) if metadata else {}
    for member in members:
        name = member.name
        if metadata is None and (found := MOODLE.search(name)):
            prefix = f"{found['name']}_{found['id']}_assignsubmission_file_"
            yield Arrival(member, _folder_of(found["name"], found["id"]), found["path"], "Moodle", prefix)
        elif found := GRADESCOPE.search(name):
            people, when = submitters.get(found["folder"], (["student"], ""))
            for person in people:
                yield Arrival(member, _folder_of(person, found["id"]), found["path"], "Gradescope", "", when)
        elif found := _of_canvas(PurePosixPath(name).name):
            student, file, late = found
            returns = PurePosixPath(name).name.removesuffix(file)
            yield Arrival(member, student, file, "Canvas", returns, late=late)


def _of_canvas(name: str) -> tuple[str, str, bool] | None:
    """Return the student's folder, the file and whether it is late, if a name is Canvas's.

    Both names may contain numbers, so the lab's name tells where the file's begins. Otherwise, the two neighboring
    numbers with the most digits are Canvas's.
    """
    if found := HIDDEN.match(name):
        return f"{ANONYMOUS}{found['code']}", found["file"], bool(found["late"])
    if found := LATE.match(name):
        return _folder_of(found["name"], found["id"]), found["file"], True
    labs = tuple(chapter.name for chapter in chapters())
    pairs = [found for found in TWO_NUMBERS.finditer(name) if found.start()]
    if not pairs:
        return None
    best = max(pairs, key=lambda found: (found[3].startswith(labs), min(len(found[1]), len(found[2])), -found.start()))
    return _folder_of(name[: best.start()], best[1]), best[3], False


def _metadata_of_gradescope(members: list[Member]) -> Member | None:
    """Return the file in which Gradescope says who handed in each folder, or None if the zip file is not Gradescope's.

    This file is beside the students' folders. Students can upload a file with the same name, but it is inside a folder.
    """
    for member in members:
        path = PurePosixPath(member.name)
        beside = str(path.parent / "x")[:-1]
        if path.name == METADATA and all(other.name.startswith(beside) for other in members):
            return member
    return None


def _submitters(metadata: Member, remarks: list[str]) -> dict[str, tuple[list[str], str]]:
    """Return who handed in each of Gradescope's folders, and when. A group has several people."""
    try:
        content = yaml.safe_load(metadata.read())
    except (Damaged, yaml.YAMLError, UnicodeError) as error:
        reason = one_line(str(error)).split(" in ")[0]
        remarks.append(f"the students' names are unknown, because {METADATA} cannot be read ({reason})")
        return {}
    found = {}
    for folder, about in content.items() if isinstance(content, dict) else ():
        about = about if isinstance(about, dict) else {}
        people = [person for person in about.get(":submitters") or [] if isinstance(person, dict)]
        names = [str(person.get(":name") or person.get(":email") or "student") for person in people]
        found[str(folder)] = (list(dict.fromkeys(names)) or ["student"], str(about.get(":created_at", "")))
    return found


def _folder_of(name: str, number: str) -> str:
    """Return a student's folder: the name without anything that has a meaning in paths, and the platform's number."""
    kept = "".join(char for char in unicodedata.normalize("NFC", name) if _is_safe(char)).strip(f" .{JOINERS}")
    short = kept.encode("utf-8", "ignore")[:MOST_NAME_BYTES].decode("utf-8", "ignore").strip()
    return f"{short or 'student'}_{number}"


def _is_safe(char: str) -> bool:
    """Return whether a character is a letter, a mark of one, or a digit in any script, or harmless otherwise."""
    return unicodedata.category(char)[0] in "LMN" or char in f"_ .,@+-{JOINERS}"
