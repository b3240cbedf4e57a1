"""List and read what a learning platform offers for download: a zip file, or the folder that a browser made from it.

Everything in it may come from a student, so links are not followed, and nothing larger than a notebook is read. One
file that cannot be read does not keep the others from being read.
"""

import contextlib
import functools
import io
import os
import stat
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from instructor.grade.submissions import MOST_BYTES

MOST_MEMBERS = 2000  # of a zip file that a student handed in
UTF8_NAME = 0x800  # the flag of a name that is known to be UTF-8
ENCRYPTED = 0x1
ELSEWHERE = "unpack the zip file with another program, and give this command the folder"


class NotAnArchive(ValueError):
    """A file cannot be sorted into folders; the message says why."""


class Damaged(ValueError):
    """One file cannot be read; the message ends a sentence that begins with its name."""


@dataclass(frozen=True)
class Member:
    """A file in a zip file or in a folder."""

    name: str  # with / between folders
    size_bytes: int
    is_link: bool
    when: float  # seconds since the epoch, or 0
    unpack: Callable[[], bytes]

    def read(self) -> bytes:
        """Return the content.

        Raises:
            Damaged: if it cannot be read.
        """
        if self.is_link:
            raise Damaged("is a link")
        content = self.unpack() if self.size_bytes <= MOST_BYTES else b""
        if max(self.size_bytes, len(content)) > MOST_BYTES:  # The size in the header could be wrong.
            raise Damaged(f"is larger than {MOST_BYTES // 1_000_000} MB")
        return content


@contextlib.contextmanager
def opened(path: Path) -> Iterator[list[Member]]:
    """Open a zip file or a folder, and list its files.

    Raises:
        NotAnArchive: if it is neither, or damaged as a whole.
    """
    if path.is_dir():
        yield list(_in_folder(path))
        return
    try:
        archive = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        advice = "; download it again" if path.exists() else ""
        raise NotAnArchive(f"{path.name} cannot be read: {error}{advice}") from None
    with archive:
        yield _in_zip(archive)


@contextlib.contextmanager
def inside(member: Member) -> Iterator[list[Member]]:
    """Open a zip file that a student handed in. There is nothing in it if it cannot be read."""
    try:
        archive = zipfile.ZipFile(io.BytesIO(member.read()))
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        yield []
        return
    with archive:
        yield _in_zip(archive)[:MOST_MEMBERS]


def _in_folder(folder: Path) -> Iterator[Member]:
    for parent, _, names in os.walk(folder):
        for path in sorted(Path(parent, name) for name in names):
            about = path.lstat()
            is_link = not stat.S_ISREG(about.st_mode)
            name = path.relative_to(folder).as_posix()
            yield Member(name, about.st_size, is_link, about.st_mtime, functools.partial(_content, path))


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from None


def _in_zip(archive: zipfile.ZipFile) -> list[Member]:
    return [
        Member(
            _name_of(info),
            info.file_size,
            stat.S_ISLNK(info.external_attr >> 16),
            _time_of(info),
            functools.partial(_unpacked, archive, info),
        )
        for info in archive.infolist()
        if not info.is_dir()
    ]


def _name_of(info: zipfile.ZipInfo) -> str:
    """Return a file's name. Some programs write UTF-8 without saying so, and Python then reads it as cp437."""
    name = info.filename
    if not info.flag_bits & UTF8_NAME:
        with contextlib.suppress(UnicodeError):
            name = name.encode("cp437").decode("utf-8")
    return name.replace("\\", "/")


def _time_of(info: zipfile.ZipInfo) -> float:
    try:
        return datetime(*info.date_time).timestamp()
    except (ValueError, OverflowError, OSError):
        return 0.0


def _unpacked(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    if info.flag_bits & ENCRYPTED:
        raise Damaged(f"is encrypted: {ELSEWHERE}")
    try:
        with archive.open(info) as packed:
            return packed.read(MOST_BYTES + 1)
    except NotImplementedError:
        raise Damaged(
            f"is compressed with method {info.compress_type}, which Python cannot read: {ELSEWHERE}"
        ) from None
    except Exception:  # Each method of compression has errors of its own.
        raise Damaged("is damaged: download the zip file again") from None
