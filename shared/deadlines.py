"""The deadlines of the course, which are longer on a machine that is slow or busy.

Every deadline in the code is generous for an idle machine, and passes through `scaled`. `make test` measures how much
slower the machine is at the moment, and sets COURSE_TIME_SCALE for the processes that it starts.
"""

import os

SCALE = "COURSE_TIME_SCALE"
MOST_ROUNDS = "COURSE_ROUNDS"  # an environment variable: how often tests that need no precise times measure at most


def time_scale() -> float:
    """Return how many times longer than on an idle machine things may take: COURSE_TIME_SCALE, but at least 1."""
    return max(1.0, float(os.environ.get(SCALE) or 1.0))


def scaled(seconds: float) -> float:
    """Return the deadline for something that should be done within `seconds` on an idle machine."""
    return seconds * time_scale()
