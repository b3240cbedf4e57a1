"""Show which tests are running and how much time is left."""

import shutil
import sys
import time

from tests.runner.results import Results

EVERY_S = 30.0  # if lines cannot be overwritten, as in a CI log
LONGEST_SHOWN = 3  # running tests
SETTLED_S = 30.0  # Until then, the estimate relies on the number of workers; later, on their measured speed.


class Progress:
    """Shows a phase's progress: one line that is overwritten in a terminal, or a new line now and then in a log."""

    def __init__(self, phase: str, results: Results, usual_s: dict[str, float], workers: int, stream=None):
        self._phase, self._results, self._usual_s, self._workers = phase, results, usual_s, workers
        self._stream = stream or sys.stdout
        self._in_place = self._stream.isatty()
        self._began_s = self._shown_s = time.monotonic()
        self._shown: set[str] = set()  # failures

    def show(self) -> None:
        """Show new failures, and update the line if it is time."""
        for test in self._results.failed:
            if test.name not in self._shown:
                self._shown.add(test.name)
                self._write(f"FAILED {test.name} · {test.reason}\n")
        now_s = time.monotonic()
        if self._in_place:
            width = shutil.get_terminal_size().columns - 1
            self._write(self.line(now_s)[:width])
        elif now_s - self._shown_s >= EVERY_S:
            self._shown_s = now_s
            self._write(self.line(now_s) + "\n")

    def close(self) -> None:
        """Remove the line."""
        if self._in_place:
            self._write("")

    def _write(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}" if self._in_place else text)
        self._stream.flush()

    def line(self, now_s: float) -> str:
        """Return the text of the line."""
        results = self._results
        if not results.collected:
            return f"{self._phase}: collecting tests"
        parts = [f"{self._phase}: {len(results.done)} of {len(results.collected)} tests done"]
        if results.failed:
            parts.append(f"{len(results.failed)} failed")
        left_s = self.seconds_left(now_s)
        if left_s is not None:
            parts.append(f"about {duration(left_s)} left")
        oldest = sorted(results.running.items(), key=lambda test: test[1])[:LONGEST_SHOWN]
        running = [f"{short(name)} ({duration(now_s - since)})" for name, since in oldest]
        return ", ".join(parts) + (f" · running: {', '.join(running)}" if running else "")

    def seconds_left(self, now_s: float) -> float | None:
        """Estimate the remaining time from each test's last duration and the speed of this run in comparison.

        Returns None when no test has a known duration yet.
        """
        done = {test.name: test.seconds for test in self._results.done}
        known = self._usual_s | {name: took for name, took in done.items() if name not in self._usual_s}
        known = {name: known[name] for name in self._results.collected if name in known}
        if not known:
            return None
        average_s = sum(known.values()) / len(known)
        done_s = sum(known[name] for name in done if name in known)
        left_s = sum(known.get(name, average_s) for name in self._results.collected if name not in done)
        speed = (done_s + self._workers * SETTLED_S) / (now_s - self._began_s + SETTLED_S)
        return left_s / speed


def short(name: str) -> str:
    """Return a short name for a test: its file, and its parameters or its function."""
    file, _, test = name.partition("::")
    parameters = test.partition("[")[2].rstrip("]")
    return f"{file.rsplit('/', 1)[-1]} {parameters or test}".strip()


def duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
