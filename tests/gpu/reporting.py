"""How a program tells `make gpu` what it found: one file, rewritten after each check, so that no result is lost if the
program hangs or is killed."""

import contextlib
import json
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from tests.gpu.results import FAILED, PASSED, Check


class Report:
    """The checks and measurements of one program."""

    def __init__(self, path: Path):
        self._path = path
        self.checks: list[Check] = []
        self.notes: list[str] = []

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[None]:
        """Record whether the block raises an error, and print its traceback if it does."""
        self.begin(name)
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(Check(name, FAILED, as_line(error)))
        else:
            self.add(Check(name, PASSED))

    def begin(self, name: str) -> None:
        """Record what is being tried, in case it never ends."""
        self._write(doing=name)

    def add(self, check: Check) -> None:
        self.checks.append(check)
        print(f"{check.name}: {check.outcome} {check.reason}".rstrip(), flush=True)
        self._write()

    def note(self, text: str) -> None:
        self.notes.append(text)
        print(text, flush=True)
        self._write()

    def _write(self, doing: str = "") -> None:
        content = {"checks": [asdict(check) for check in self.checks], "notes": self.notes, "doing": doing}
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(content))
        beside.replace(self._path)

    @property
    def passed(self) -> bool:
        return all(check.outcome == PASSED for check in self.checks)


def as_line(error: Exception) -> str:
    """Return an error's message in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines)[:300]}" if lines else type(error).__name__
