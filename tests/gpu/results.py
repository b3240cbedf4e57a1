"""The results of a part, and of the whole run, and how a program tells `make gpu` what it found."""

import contextlib
import json
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

PASSED, FAILED, TIMED_OUT, SKIPPED, NOT_RUN = "passed", "failed", "out of time", "skipped", "not run"
OUTCOMES = (PASSED, FAILED, TIMED_OUT, SKIPPED, NOT_RUN)


@dataclass(frozen=True)
class Check:
    """One thing that a part tried."""

    name: str
    outcome: str
    reason: str = ""


@dataclass(frozen=True)
class Aim:
    """A measured value, and the highest value that we hoped for. A missed aim is not a failure."""

    what: str
    value: float
    unit: str
    most: float

    @property
    def met(self) -> bool:
        return self.value <= self.most


@dataclass
class PartResult:
    """The result of one part of a step."""

    step: str
    part: str
    outcome: str
    seconds: float = 0.0
    reason: str = ""
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # measurements, as text
    aims: list[Aim] = field(default_factory=list)
    benchmark: dict | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.step, self.part

    @classmethod
    def from_dict(cls, values: dict) -> "PartResult":
        checks = [Check(**check) for check in values["checks"]]
        return cls(**values | {"checks": checks, "aims": [Aim(**aim) for aim in values["aims"]]})


@dataclass
class Run:
    """Everything that a run of `make gpu` found out."""

    machine: dict
    title: dict[str, str]  # what each step proves, by its name, in order
    began: str  # the date and the time
    dry: bool = False
    commit: str = ""
    kept_since: str = ""  # when the oldest of the results that were kept from earlier runs was measured
    missing: list[str] = field(default_factory=list)  # packages
    parts: list[PartResult] = field(default_factory=list)

    def of(self, step: str) -> list[PartResult]:
        return [part for part in self.parts if part.step == step]

    @property
    def failed(self) -> list[PartResult]:
        return [part for part in self.parts if part.outcome in (FAILED, TIMED_OUT)]

    @property
    def aims(self) -> list[Aim]:
        return [aim for part in self.parts for aim in part.aims]

    def counts(self, step: str) -> str:
        """Return how many parts of a step passed, failed and so on, in words."""
        counts = Counter(part.outcome for part in self.of(step))
        return ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES if counts[outcome])

    def to_dict(self) -> dict:
        return asdict(self) | {"aims": [asdict(aim) | {"met": aim.met} for aim in self.aims]}

    @classmethod
    def from_dict(cls, values: dict) -> "Run":
        values = {name: value for name, value in values.items() if name != "aims"}
        return cls(**values | {"parts": [PartResult.from_dict(part) for part in values["parts"]]})


class Report:
    """The checks and measurements of one program.

    They are in one file, rewritten after each check, so that no result is lost if the program hangs or is killed.
    """

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
