"""Find out how many submissions this machine can grade at once, and how slow it is at the moment.

On a slow machine, deadlines are longer, so that none passes while correct code waits for a core. Grading runs at a low
priority, so on a busy machine it gets much less CPU time than other programs. To find out how slow the machine is, a
fixed piece of work is therefore timed at that priority, on all cores at once.
"""

import subprocess
import sys
from collections.abc import Sequence

import joblib
import psutil

from instructor.grade import cgroup
from instructor.grade.limits import NICENESS
from shared import deadlines
from shared.checks.engine.framework import WORLD_SIZES
from shared.deadlines import scaled

_WORK = "import os, time; os.nice({}); began = time.perf_counter(); sum(i * i for i in range(1_000_000)); "
_WORK += "print(time.perf_counter() - began)"
IDLE_S = 0.075  # how long this work takes on the idle machine for which the deadlines were chosen
JOBS_PER_CORE = 2
SLOW = 2.5  # Below this, the deadlines are generous enough.
MARGIN = 2.0  # The machine may get busier after it was measured.
MOST_SCALE = 20.0
MEMORY_EACH_BYTES = 2_000_000_000  # Grading one of our solutions takes 1 GB.
ENDED_BY_A_DEADLINE = ("was stopped after", "no result was reported within")


def most_jobs() -> int:
    """Return how many submissions to grade at once: two for each core, if there is memory for them.

    A submission has up to four ranks, but these wait for each other's messages much of the time. On two cores, lab 01
    took 12 s per submission with four submissions at once, and 15 s per submission with two at once.
    """
    return max(1, min(JOBS_PER_CORE * joblib.cpu_count(), _free_bytes() // MEMORY_EACH_BYTES))


def most_memory_bytes(jobs: int) -> int:
    """Return how much memory each of `jobs` submissions may use: a share of what is free, but at least 2 GB."""
    return max(MEMORY_EACH_BYTES, int(0.9 * _free_bytes() / jobs))


def _free_bytes() -> int:
    return min(psutil.virtual_memory().available, cgroup.limit_bytes() or sys.maxsize)


def slowdown() -> float:
    """Return how many times slower than the idle reference machine a judge would be now."""
    command = (sys.executable, "-S", "-c", _WORK.format(NICENESS))
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, encoding="utf-8", errors="replace"
        )
        for _ in range(joblib.cpu_count())
    ]
    return max(_seconds_of(process) for process in started) / IDLE_S


def _seconds_of(process: subprocess.Popen) -> float:
    try:
        printed, _ = process.communicate(timeout=scaled(30))
        return float(printed)
    except (subprocess.TimeoutExpired, ValueError):
        process.kill()
        process.wait()
        return MOST_SCALE * IDLE_S


def time_scale(beside: int = 0) -> float:
    """Return the factor by which to multiply deadlines now. It is at least COURSE_TIME_SCALE, which is 1 by default.

    Args:
        beside: How many submissions are judged at the same moment. They slow down the measurement, but deadlines
            already allow for them, so their effect is removed. Otherwise, code that never ends would be stopped later.
    """
    measured = slowdown() / (1 + beside * max(WORLD_SIZES) / joblib.cpu_count())
    needed = MARGIN * measured if measured > SLOW else 1.0
    return max(deadlines.time_scale(), min(MOST_SCALE, round(needed, 1)))


def ran_out_of_time(evidence: Sequence[str]) -> bool:
    """Return whether these texts say that a deadline ended the code that was judged."""
    return any(words in text for text in evidence for words in ENDED_BY_A_DEADLINE)
