"""Measure how busy this machine is, and how many workers it can run."""

import os
import subprocess
import sys
import time

import joblib
import psutil

from shared import deadlines

WORK = "sum(i * i for i in range(20_000_000))"
IDLE_S = 1.5  # duration of WORK on all cores of the idle machine on which the deadlines were chosen
MARGIN = 2.0  # the machine may get busier after it was measured
MOST_SCALE = 8.0  # Deadlines are generous already. A larger scale would only make hanging tests take longer.
WORKER_BYTES = 2e9  # of a worker with its ranks and a browser


def cores() -> int:
    """Return how many cores this process may use: a container may have fewer than its machine."""
    return joblib.cpu_count()


def workers(wanted: int) -> int:
    """Return how many workers to start: as many as wanted, if there is enough memory for them."""
    return max(1, min(wanted, int(psutil.virtual_memory().available // WORKER_BYTES)))


def measure_time_scale() -> float:
    """Return how many times slower than the idle reference machine this one is at the moment: 1 to MOST_SCALE."""
    began_s = time.monotonic()
    busy = [subprocess.Popen((sys.executable, "-c", WORK)) for _ in range(cores())]
    for process in busy:
        process.wait()
    return min(MOST_SCALE, max(1.0, (time.monotonic() - began_s) / IDLE_S))


def calibrate() -> float:
    """Measure the time scale, and set twice its value for all processes that start from now on. Returns that value.

    A scale that the user has set is never lowered.
    """
    scale = max(deadlines.time_scale(), round(min(MOST_SCALE, MARGIN * measure_time_scale()), 1))
    os.environ[deadlines.SCALE] = f"{scale:g}"
    return scale
