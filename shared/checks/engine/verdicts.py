"""The result of a check, as the checks, their display, the progress page and other programs share it."""

from dataclasses import asdict, dataclass

SAME_AS = "the same as in"  # begins the evidence that refers to another check's


@dataclass(frozen=True)
class Verdict:
    """The result of one check of one exercise."""

    exercise: str
    check: str
    passed: bool
    world_sizes: tuple[int, ...] = ()
    evidence: str = ""
    hint: str = ""

    @property
    def ran(self) -> bool:
        """Whether the check ran. It does not if an earlier one showed that it could not."""
        return bool(self.world_sizes)

    @property
    def result(self) -> str:
        """The result in words."""
        if not self.ran:
            return "did not run"
        return "passed" if self.passed else "failed"


def as_json(verdicts: list[Verdict]) -> list[dict]:
    return [asdict(verdict) for verdict in verdicts]
