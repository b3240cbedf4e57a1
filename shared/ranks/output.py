"""What a cell prints on a rank: through Python's streams, and through file descriptors 1 and 2.

C code and subprocesses write to the file descriptors, which lead to the rank's log. NCCL writes there, too, if
NCCL_DEBUG is set.
"""

import codecs
import contextlib
import ctypes
import io
import os
import re
import stat
import sys
from typing import Any

OUTPUT_LIMIT_LINES = 200
OUTPUT_LIMIT_CHARACTERS = 20_000
_CHUNK_BYTES, _MOST_READ_BYTES = 2**16, 2**26
# What torch's C++ puts before a message. The time and the rank would make equal messages of ranks different.
_BEFORE_MESSAGES = re.compile(r"^(?:\[rank\d+\]:)?\[[IWEF]\d{4} [\d:.]+ [^\]\n]*\] ", re.MULTILINE)
# Messages that would only worry a student. Torch writes all but the last one while it connects ranks. The last one is a
# false alarm, as its own text admits, if parameters are unused only in some steps or only on some ranks.
_NOISE = re.compile(
    r"^.*(?: socket\.cpp:\d+\] |Unable to resolve hostname to a \(local\) address|\[Gloo\] Rank \d+ is connected to"
    r"|find_unused_parameters=True was specified in DDP constructor, but did not find any).*\n?",
    re.MULTILINE,
)
_UNBUFFERED = 2  # _IONBF, on Linux and macOS


class Output(io.StringIO):
    """Collects what a cell prints and displays, until the cell is stopped.

    It keeps only the first lines, because a cell that prints in an endless loop must not fill up the memory or the
    notebook.
    """

    captured: Any = None  # IPython's list of what the cell displays
    omitted_characters = 0
    omitted_lines = 0
    _displays_kept: int | None = None  # None unless the cell was stopped

    def drop_the_rest(self) -> None:
        """Ignore what is printed and displayed from now on."""
        self._displays_kept = len(self.captured.outputs) if self.captured else 0
        log.drop_the_rest()

    def displays(self) -> list[dict]:
        """Return what the cell displayed, as mime bundles."""
        shown = self.captured.outputs if self.captured else []
        return [output.data for output in shown[: self._displays_kept]]

    def write(self, text: str) -> int:
        if self._displays_kept is not None:
            return len(text)
        room = OUTPUT_LIMIT_CHARACTERS - self.tell()
        if len(text) > room:
            self.omitted_characters += len(text) - room
            self.omitted_lines += text.count("\n", room)
        super().write(text[:room])
        return len(text)

    def getvalue(self) -> str:
        lines = super().getvalue().splitlines(keepends=True)
        if self.omitted_characters and not lines[-1].endswith("\n"):  # the last line is incomplete
            if len(lines) == 1:
                return lines[0] + f"\n… {self.omitted_characters} more characters not shown\n"
            lines.pop()
        shown = lines[:OUTPUT_LIMIT_LINES]
        omitted = len(lines) - len(shown) + max(self.omitted_lines, bool(self.omitted_characters))
        note = f"… {omitted} more line{'s' if omitted > 1 else ''} not shown\n" if omitted else ""
        return "".join(shown) + note


class Log:
    """The log of this process: the file to which its descriptors 1 and 2 lead.

    It is read through descriptor 1, because a rank's user may not be allowed to open it by its path.
    """

    def __init__(self):
        self._file: tuple | None = None  # identifies the file; None if descriptor 1 is no file, as in a terminal
        self._begins = 0  # where the text of the current cell begins
        self._ends: int | None = None  # None unless the cell was stopped

    def attach(self) -> None:
        """Begin to watch the log. What C code prints reaches it at once, even without a newline before a crash."""
        libc = ctypes.CDLL(None)
        name = "__stdoutp" if sys.platform == "darwin" else "stdout"
        with contextlib.suppress(ValueError):  # a C library without this name
            libc.setvbuf(ctypes.c_void_p.in_dll(libc, name), None, _UNBUFFERED, 0)
        self._file, self._begins = _file_and_size()

    def cell_begins(self) -> None:
        """Leave out what was written between two cells, unless NCCL_DEBUG asks for what NCCL writes there."""
        file, size = _file_and_size()
        if file != self._file or not os.environ.get("NCCL_DEBUG"):
            self._file, self._begins = file, size
        self._ends = None

    def drop_the_rest(self) -> None:
        """Ignore what is written from now on, until the next cell begins."""
        self._ends = _file_and_size()[1]

    def limit(self) -> None:
        """Cut off what will not be read, so that a program that prints endlessly does not fill the disk."""
        file, size = _file_and_size()
        longest = self._begins + _MOST_READ_BYTES + 1  # the last byte shows that there was more
        if file is not None and file == self._file and size > longest:
            os.ftruncate(1, longest)

    def cell_ends(self) -> str:
        """Return what was written since the cell began, with a newline at its end."""
        if sys.__stdout__ is not None:
            with contextlib.suppress(OSError, ValueError):  # it may be closed
                sys.__stdout__.flush()
        file, size = _file_and_size()
        begins, ends = self._begins, size if self._ends is None else self._ends
        if file is None or file != self._file or ends <= begins:
            return ""
        self._begins = size
        return read(1, begins, ends)


def _file_and_size() -> tuple[tuple | None, int]:
    """Return what identifies the file behind descriptor 1, or None if it is no file, and its size in bytes."""
    try:
        found = os.fstat(1)
    except OSError:  # a cell has closed it
        return None, 0
    return ((found.st_dev, found.st_ino) if stat.S_ISREG(found.st_mode) else None), found.st_size


def read(descriptor: int, begins: int, ends: int) -> str:
    """Return a part of a file as text, shortened as an Output is, without noise, and with a newline at its end.

    Reads at most _MOST_READ_BYTES of it, and never holds more than a chunk in memory.
    """
    text, decoder = Output(), codecs.getincrementaldecoder("utf-8")("replace")
    stops = min(ends, begins + _MOST_READ_BYTES)
    while begins < stops and (chunk := os.pread(descriptor, min(_CHUNK_BYTES, stops - begins), begins)):
        begins += len(chunk)
        text.write(decoder.decode(chunk))
    text.write(decoder.decode(b"", final=True))
    kept = _BEFORE_MESSAGES.sub("", _NOISE.sub("", text.getvalue()))
    return ended(kept) + ("… and more, which was not read\n" if stops < ends else "")


def ended(text: str) -> str:
    """Return the text with a newline at its end, unless it is empty."""
    return text if not text or text.endswith("\n") else text + "\n"


log = Log()
