"""Records the sizes of this rank's latest sends and receives in a file, which outlives the process.

gloo aborts a process that receives more bytes than its tensor holds. That process can no longer explain anything, so
the kernel compares the sizes that both ends have recorded.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

_RECORD = struct.Struct("<?4sqqqq40s")
_RECORDS = 64
_EMPTY = bytes(_RECORD.size * _RECORDS)


@dataclass(frozen=True)
class Transfer:
    """A send or receive, as its rank launched it."""

    op: str
    partner: int
    number: int  # of this operation with this partner
    payload_bytes: int
    line: int  # in the student's code; 0 outside it
    function: str


class Recorder:
    """Writes to the file of one rank."""

    def __init__(self, path: str):
        Path(path).write_bytes(_EMPTY)
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), len(_EMPTY))
        self._written = 0

    def clear(self) -> None:
        self._memory[:] = _EMPTY

    def write(self, call) -> None:
        """Record a Call. This takes about a microsecond."""
        _, line, function = call.called_from or ("", 0, "")
        fields = (call.op.encode(), -1 if call.partner is None else call.partner, call.number, call.payload_bytes, line)
        start = self._written % _RECORDS * _RECORD.size
        _RECORD.pack_into(self._memory, start, True, *fields, function.encode())
        self._written += 1


def read(path: str) -> list[Transfer]:
    """Return the transfers in a file, or none if there is no such file."""
    if not Path(path).exists():
        return []
    records = [record for record in _RECORD.iter_unpack(Path(path).read_bytes()) if record[0]]
    return [
        Transfer(_text(op), partner, number, payload_bytes, line, _text(function))
        for _, op, partner, number, payload_bytes, line, function in records
    ]


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
