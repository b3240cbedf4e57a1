"""The results of a part, and of the whole run."""

from collections import Counter
from dataclasses import asdict, dataclass, field

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
