"""Keep the last run for the next one: which tests failed, and how long each test took."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.runner.results import Results

PATH = Path("build/tests/last_run.json")


@dataclass
class Record:
    """The record of the last run.

    Args:
        failed: The failed tests of each phase. The list is empty if a phase failed without a failed test.
        seconds: How long each test took when it last ran.
    """

    failed: dict[str, list[str]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path = PATH) -> "Record":
        """Read the last run. Returns an empty record if the file is missing or broken."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return cls()

    def save(self, path: Path = PATH) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(asdict(self), indent=1))
        beside.replace(path)

    def note(self, phase: str, results: Results, failed: bool, whole: bool) -> None:
        """Record a phase.

        Args:
            failed: Whether the phase failed, with or without a failed test.
            whole: Whether all of its tests were chosen. Otherwise, earlier failures of tests that did not run are kept.
        """
        self.seconds |= {test.name: round(test.seconds, 2) for test in results.done}
        kept = [] if whole else [name for name in self.failed.get(phase, []) if name not in results.tests]
        if failed or kept:
            self.failed[phase] = kept + [test.name for test in results.failed]
        else:
            self.failed.pop(phase, None)
