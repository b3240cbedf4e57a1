"""Run a part with a deadline, and read its results."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.gpu.results import FAILED, NOT_RUN, PASSED, SKIPPED, TIMED_OUT, Aim, Check, PartResult
from tests.gpu.steps import KEPT, RESULT, ROOT, Part
from tests.gpu.supervisor import ENDING_S, LAST_WORDS_S
from tests.runner.results import Results

SUPERVISOR_S = 60.0 + LAST_WORDS_S + 2 * ENDING_S  # beyond the deadline of the command
STOP_S = 3 * ENDING_S


def run(part: Part, left_s: float, log: Path) -> PartResult:
    """Run a part unless it is skipped.

    Args:
        left_s: The time that is left to this run, which may end a part before its own deadline.
        log: The file to which its output is appended, in the folder of the run's results.
    """
    result = PartResult(part.step, part.name, SKIPPED, reason=part.skip)
    if part.skip:
        return result
    if part.missing:
        result.reason = f"this Python lacks {', '.join(part.missing)}"
        return result
    if left_s <= 0:
        result.outcome, result.reason = NOT_RUN, "the time of this run was used up"
        return result
    with tempfile.TemporaryDirectory(prefix="gpu-") as made:
        folder = Path(made)
        deadline_s = min(part.deadline_s, left_s)
        with (folder / "output").open("w+b") as output:
            try:
                ended = _supervise(part, folder, log.parent, deadline_s, output)
            finally:
                output.seek(0)
                text = output.read().decode(errors="replace")
                with log.open("a") as file:
                    file.write(f"\n===== {part.step}: {part.name}\n{text}")
        READERS[part.reads](result, folder, text)
        _judge(result, ended, deadline_s, text)
    return result


def _supervise(part: Part, folder: Path, kept: Path, deadline_s: float, output) -> dict:
    """Run a part's command. Returns what its supervisor says about how it ended.

    Args:
        folder: The folder to which the part writes its own results.
        kept: The folder of the whole run's results.
    """
    ended = folder / "ended.json"
    command = [word.replace(RESULT, str(folder)).replace(KEPT, str(kept)) for word in part.command]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.supervisor", str(ended), str(deadline_s), str(part.grace_s), *command],
        cwd=ROOT,
        env=_environment(part),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches only us, and we tell the supervisor
    )
    try:
        process.wait(deadline_s + part.grace_s + SUPERVISOR_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _end(process)
    with contextlib.suppress(OSError, ValueError):
        return json.loads(ended.read_text())
    return {"how": "lost", "status": process.returncode, "seconds": 0.0, "left": [], "survivors": []}


def _end(process: subprocess.Popen) -> None:
    """End a supervisor, which first ends all its descendants."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _environment(part: Part) -> dict[str, str]:
    """Return the environment of a part. This Python's programs are on its PATH, because a cell may start torchrun."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return os.environ | {"PATH": path, "PYTHONPATH": python_path, "PYTHONUNBUFFERED": "1"} | part.environment


# -- the outcome


def _judge(result: PartResult, ended: dict, deadline_s: float, text: str) -> None:
    """Find the outcome of a part, and the reason if it did not pass."""
    result.seconds = round(ended["seconds"], 1)
    failed = [check for check in result.checks if check.outcome == FAILED]
    skipped = [check for check in result.checks if check.outcome == SKIPPED]
    doing = f"; its last step: {result.reason}" if result.reason else ""
    if ended["how"] == "out of time":
        result.outcome, result.reason = TIMED_OUT, f"ended after {deadline_s:.0f} s{doing}"
    elif ended["how"] != "ended":
        result.outcome, result.reason = FAILED, f"its supervisor was {ended['how']}{doing}"
    elif failed:
        more = f" ({len(failed) - 1} more failed)" if len(failed) > 1 else ""
        result.outcome, result.reason = FAILED, f"{failed[0].name}: {failed[0].reason}{more}"
    elif ended["status"] and not _no_test_ran(result, ended["status"]):
        result.outcome, result.reason = FAILED, f"{_status(ended['status'])}: {_last_line(text)}{doing}"
    elif ended["left"]:
        count = len(ended["left"])
        processes = f"{count} processes" if count > 1 else "1 process"
        result.outcome, result.reason = FAILED, f"it left {processes} behind: {ended['left'][0]}"
    elif skipped and len(skipped) == len(result.checks):
        result.outcome, result.reason = SKIPPED, skipped[0].reason
    elif not result.checks and not result.benchmark:
        result.outcome, result.reason = FAILED, f"it reported nothing: {_last_line(text)}"
    else:
        result.outcome, result.reason = PASSED, ""
    if ended["survivors"]:
        result.outcome = FAILED
        result.reason += f"; {len(ended['survivors'])} processes could not be ended, such as: {ended['survivors'][0]}"


def _no_test_ran(result: PartResult, status: int) -> bool:
    return status == 5 and bool(result.checks)  # pytest's status when all tests were deselected


def _status(status: int) -> str:
    return f"exit status {status}" if status > 0 else f"killed by {signal.Signals(-status).name}"


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")[:300]


# -- what the commands leave


def read_report(result: PartResult, folder: Path, text: str) -> None:
    """Read what our own programs report."""
    with contextlib.suppress(OSError, ValueError):
        told = json.loads((folder / "report.json").read_text())
        result.checks = [Check(**check) for check in told["checks"]]
        result.notes, result.reason = told["notes"], told["doing"]


def read_pytest(result: PartResult, folder: Path, text: str) -> None:
    """Read the events that our plugin for pytest writes."""
    events = Results()
    with contextlib.suppress(OSError, ValueError):
        for line in (folder / "events").read_text().splitlines():
            events.take(line)
    result.checks = [Check(test.name, test.verdict, test.reason.removeprefix("Skipped: ")) for test in events.done]
    result.reason = ", ".join(events.running)


def read_checks(result: PartResult, folder: Path, text: str) -> None:
    """Read the verdicts of a solution's checks."""
    told = [line for line in text.splitlines() if line.startswith('{"name"')]
    if not told:
        return
    answer = json.loads(told[-1])
    for verdict in answer["verdicts"]:
        name = f"{verdict['exercise']} · {verdict['check']}"
        result.checks.append(Check(name, PASSED if verdict["passed"] else FAILED, verdict.get("evidence") or ""))
    if answer["unusable"]:
        result.checks.append(Check(answer["name"], FAILED, answer["unusable"]))


def read_benchmark(result: PartResult, folder: Path, text: str) -> None:
    """Read the report of the benchmark: rows, aims, and the strategies that failed."""
    with contextlib.suppress(OSError, ValueError):
        told = json.loads((folder / "report.json").read_text())
        result.benchmark = told
        result.aims = [Aim(aim["what"], aim["value"], aim["unit"], aim["most"]) for aim in told["aims"]]
        result.checks = [Check(f"{row['strategy']}, {row['ranks']} ranks", PASSED) for row in told["rows"]]
        result.checks += [
            Check(f"{row['strategy']}, {row['ranks']} ranks", FAILED, row["reason"]) for row in told["failed"]
        ]


READERS: dict[str, Callable[[PartResult, Path, str], None]] = {
    "report": read_report,
    "pytest": read_pytest,
    "checks": read_checks,
    "benchmark": read_benchmark,
}
