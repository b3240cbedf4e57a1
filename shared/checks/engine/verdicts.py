"""What a check found: the one record that the checks, their display, the progress page and grading share."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Verdict:
    """What one check found."""

    exercise: str
    check: str
    passed: bool
    world_sizes: tuple[int, ...] = ()
    evidence: str = ""
    hint: str = ""


def as_json(verdicts: list[Verdict]) -> list[dict]:
    return [asdict(verdict) for verdict in verdicts]
