"""How long the course waits before it gives up: longer on a machine that is slow or busy.

Every deadline in the course is written down as what is generous on an idle machine, and passes through `scaled`.
`make test` measures how much slower the machine is at that moment and sets COURSE_TIME_SCALE for all that it starts.
"""

import os

SCALE = "COURSE_TIME_SCALE"


def time_scale() -> float:
    """Return how many times longer than on an idle machine things may take: COURSE_TIME_SCALE, but at least 1."""
    return max(1.0, float(os.environ.get(SCALE) or 1.0))


def scaled(seconds: float) -> float:
    """Return the deadline for something that should be done within `seconds` on an idle machine."""
    return seconds * time_scale()
