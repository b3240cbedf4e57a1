"""Run the instructor's checks on one student's code inside the sandbox, and report each result as soon as it is known.

    python -m instructor.grade.judge JOB.json FD

Results are written to the pipe FD as lines of JSON, each as soon as it is known. If an exercise crashes this process,
only its own verdict is lost. The lines are:

    {"ready": true}
    {"notices": [...], "notes": [...], "added": {"ManualDDP": {"definition 3": its code, ...}}}
    {"begin": "ManualDDP"}
    {"done": "ManualDDP", "verdicts": [...], "reason": ""}     or {"broken": "ManualDDP", "reason": ...} as the last one
    {"failed": why}     as the last one, if this machine failed and not the student's code
"""

import contextlib
import importlib
import io
import json
import os
import random
import re
import sys
import tempfile
import time
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

from instructor.grade import (
    assembly,
    drawing,
    forked_server,
    isolation,
    network_meter,
    safe_loading,
    static_checks,
    store_proxy,
)
from instructor.grade.limits import Limits, become, bound
from shared import ranks
from shared.checks.engine import candidate, failures, folders, framework
from shared.checks.engine.attempts import PROBE_TIMEOUT_S
from shared.checks.engine.verdicts import Verdict, as_json
from shared.ranks import processes

NOT_MEASURED = "This system did not let us measure from outside how many bytes the ranks sent."
SAME_USER = "The grader was not root, so the ranks and their judge ran as one user and could share files."
SHARED_MEMORY = "This system did not give each rank memory and folders of its own, so ranks could share files."
GIVEN = ("torch", "dist", "rank", "world_size", "device", "display", "get_ipython")
# Every `%%ranks` cell has these names (rankside.join), so code that works in a notebook works here.
PRELUDE = f"""from IPython import get_ipython
from IPython.display import display
locals().update({{name: get_ipython().user_ns[name] for name in {GIVEN[:5]}}})
"""
IN_THE_FILE = re.compile(r"(?:\S*/)?candidate\.py, line (\d+)")


def main(job_file: str, results: str) -> None:
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    bound(Limits(**job["limits"]))
    missing = []
    if os.getuid() != 0:
        missing.append(SAME_USER)
    elif not job["own_network"] or not isolation.is_complete():  # All users of a container can write to its /tmp.
        missing.append(SHARED_MEMORY)
    _start_fork_server(job)
    if not job["own_network"] or not network_meter.available():
        missing.append(NOT_MEASURED)
    become(job["users"][0])
    pipe = os.fdopen(int(results), "w", buffering=1, encoding="utf-8")
    os.set_inheritable(pipe.fileno(), False)

    def report(**line) -> None:
        print(json.dumps(line), file=pipe)

    with contextlib.redirect_stdout(io.StringIO()):
        gates = store_proxy.install()
        ranks.start(max(framework.WORLD_SIZES), detect_mismatch=False)
        rejected = safe_loading.install()
        judge = Judge(job, report, rejected, gates, missing)
        judge.prepare()
        report(
            ready=True
        )  # From here on, any failure is caused by the student's code, except for the judge's own files.
        try:
            judge.run()
        except (folders.NoFolder, OSError) as error:
            if isinstance(error, OSError) and error.errno not in folders.OF_THE_MACHINE:
                raise
            report(failed=str(error))
    os._exit(0)  # The sandbox ends all processes at once. Stopping the ranks one by one would take a second.


def _start_fork_server(job: dict) -> None:
    """Start the fork server while this process is root, so that it can start processes of other users."""
    run_dir = tempfile.mkdtemp(prefix="ranks-")
    limits = Limits(**job["limits"])
    users = job["users"] if os.getuid() == 0 else None
    if users:
        for folder in (os.environ["HOME"], run_dir):  # No rank may write there.
            os.chown(folder, users[0], users[0])
            os.chmod(folder, 0o755)
    isolation = {"module": "instructor.grade.isolation", "users": users, "run_dir": run_dir}
    isolation |= {"files": limits.all_files, "all_bytes": limits.scratch_bytes}
    server = forked_server.ForkServer(run_dir, isolation=isolation)
    processes.surroundings.start_fork_server = lambda link: server


def _count_failed(verdicts: list[Verdict]) -> int:
    return sum(not verdict.passed for verdict in verdicts)


class Judge:
    """Judges one student's code and reports the results."""

    def __init__(self, job: dict, report, rejected: list[str], gates: list[store_proxy.Gate], missing: list[str]):
        self.job, self.report, self.rejected, self.gates, self.missing = job, report, rejected, gates, missing
        self.checks = f"shared.checks.{job['module']}"
        self.path = str(Path(os.environ["HOME"]) / "candidate.py")
        self.left_out: dict[str, str] = {}
        self.meter = None if NOT_MEASURED in missing else network_meter.Meter(ranks.current, self._announced_ports)
        self.runner = drawing.GradingRunner(self.meter)
        self.cells: list[dict] = []  # those that can be loaded
        self.added: list[dict] = []  # what they use from the notebook's other cells
        self.places: list[tuple[int, dict]] = []  # the line of the candidate's file where each cell begins

    def _announced_ports(self) -> set[int]:
        return {port for each in self.gates for port in each.announced_ports | each.own_ports}

    def prepare(self) -> None:
        """Try everything without the student's code.

        Raises:
            RuntimeError: if the ranks cannot load the judge's own file.
        """
        if why := self._try([])[1]:
            raise RuntimeError(f"the ranks cannot load an empty file: {why}")

    def run(self) -> None:
        defined = self._load(self._screen())
        for task in self.job["tasks"]:
            self.report(begin=task["name"])
            try:
                verdicts, reason = self._judge(task, defined)
                reason = self._tampering() or reason
            except folders.NoFolder:
                raise
            except ranks.RanksError as error:
                self.report(broken=task["name"], reason=str(error).split(". ")[0])
                return  # Ranks are missing. The grader starts another judge for the remaining exercises.
            verdicts = [replace(each, evidence=self._placed(each.evidence)) for each in verdicts]
            self.report(done=task["name"], verdicts=as_json(verdicts), reason=self._placed(reason))

    def _screen(self) -> list[dict]:
        """Return the cells that may be loaded, with what they use from the notebook's other cells."""
        notices, cells = [], self.job["cells"]
        for cell in [cell for cell in cells if cell["grade_id"]] + self.job["others"]:
            cell["source"] = static_checks.without_magics(cell["source"])
        wanted = [name for task in self.job["tasks"] for name in task["names"]]
        self.added = assembly.from_other_cells(cells, self.job["others"], wanted, GIVEN)
        given = "\n".join(cell["source"] for cell in cells if not cell["grade_id"])
        for cell in assembly.inserted(cells, self.added, self.job["blank"]):
            why = self._examine(cell, given, notices) if cell["grade_id"] else ""
            if why:
                self.left_out[cell["grade_id"]] = why
            else:
                self.cells.append(cell)
        added = {task["name"]: self._added_for(task) for task in self.job["tasks"]}
        self.report(
            notices=notices, notes=self.missing, added={name: assembly.code_of(cells) for name, cells in added.items()}
        )
        return self.cells

    def _added_for(self, task: dict) -> list[dict]:
        """Return the added cells that an exercise uses, or that answer it."""
        own = [cell for cell in self.job["cells"] if cell["grade_id"] in task["cells"]]
        return assembly.used_from(self.added, own, task["names"])

    def _examine(self, cell: dict, given: str, notices: list[str]) -> str:
        """Return why a student's cell cannot be loaded, or "". Add to the notices what an instructor should look at."""
        where = f"{cell['place']}, "
        source = "\n" * (cell["line"] - 1) + cell["source"]  # so that its lines have the numbers of the student's cell
        if why := static_checks.problem(source, where):
            return why
        names = tuple(self.job["forbidden"]), tuple(self.job["ready_made"])
        if found := static_checks.forbidden(source, *names):
            return f"rejected: {where}{', '.join(found)}. {static_checks.why_forbidden(source, *names)}"
        notices += [f"{where}{notice}" for notice in static_checks.notices(source, given)]
        return ""

    def _load(self, cells: list[dict]) -> dict[str, str]:
        """Write the cells into one file and return the names that it defines, as `candidate.load` does.

        A cell that fails is left out, just as a notebook can continue after a failed cell.
        """
        loaded, why = self._try(cells)
        kept: list[dict] = [] if why else cells
        for cell in cells if why else ():
            found, why = self._try([*kept, cell])
            if not why:
                kept, loaded = [*kept, cell], found
            elif "lends" in cell:
                failed = f"{cell['place']} could not be loaded: {self._placed(why)}"
                self.report(notes=[f"The definition of {', '.join(sorted(cell['lends'].names))} in {failed}"])
            elif cell["grade_id"]:
                self.left_out[cell["grade_id"]] = f"its cell failed when it was loaded: {self._placed(why)}"
        names, calls = loaded or ({}, 0)
        self.cells = kept
        self._leave_out_examples(calls)
        return names

    def _leave_out_examples(self, calls: int) -> None:
        """Leave out code that only tries the exercises, if the cells can be loaded without it.

        If no collectives were called, only assertions are left out.

        Args:
            calls: How many collectives were called while the cells were loaded.
        """
        shortened = assembly.without_examples(self.cells) if calls else assembly.without_asserts(self.cells)
        if shortened != self.cells and not self._try(shortened)[1]:
            self.cells = shortened
        self._write(self.cells)

    def _try(self, cells: list[dict]) -> tuple[tuple[dict[str, str], int] | None, str]:
        """Return what `candidate.load` returns on rank 0, or None and the reason why the cells cannot be loaded."""
        self._write(cells)
        try:
            return ranks.run(candidate.load, self.path, timeout_s=PROBE_TIMEOUT_S)[0], ""
        except ranks.CellFailed as failure:
            return None, failure.explanation

    def _write(self, cells: list[dict]) -> None:
        source, self.places = assembly.assembled(cells, PRELUDE)
        Path(self.path).write_text(source, encoding="utf-8")

    def _placed(self, text: str) -> str:
        """Replace lines of the file, which students never see, by lines of their exercises."""

        def place(found: re.Match) -> str:
            line = int(found[1])
            begins, cell = max((each for each in self.places if each[0] <= line), key=itemgetter(0), default=(0, None))
            if cell is None or not cell["place"]:
                return "the lab's own code"
            return f"{cell['place']}, line {line - begins + cell['line']}"

        return IN_THE_FILE.sub(place, text)

    def _judge(self, task: dict, defined: dict[str, str]) -> tuple[list[Verdict], str]:
        """Return the verdicts, or the reason why there are none."""
        exercise = getattr(importlib.import_module(self.checks), task["name"])
        names = [*task["cells"], *(cell["grade_id"] for cell in self._added_for(task))]
        left_out = [self.left_out[name] for name in names if name in self.left_out]
        if left_out:
            return [], left_out[0]
        if not {exercise.piece, exercise.fallback_name} & set(defined):
            return [], f"{exercise.piece} is not defined; its cell is missing or empty"
        try:
            began, seed = time.monotonic(), random.SystemRandom().randrange(2**31)
            verdicts = framework.run_exercise(exercise, self.path, seed, runner=self.runner)
            has_time = time.monotonic() - began < self.job["limits"]["seconds_each"] / 4
            if (
                _count_failed(verdicts)
                and has_time
                and (early := assembly.without_later_cells(self.cells, task["cells"], exercise.piece))
            ):
                verdicts = min(verdicts, self._verdicts_with(early, exercise, seed) or verdicts, key=_count_failed)
            return verdicts, ""
        except failures.Unusable as error:
            return [], str(error)

    def _verdicts_with(self, cells: list[dict], exercise: framework.Exercise, seed: int) -> list[Verdict]:
        """Return the verdicts with only these cells and the same random choices, or [] if they lack the exercise."""
        self._write(cells)
        try:
            return framework.run_exercise(exercise, self.path, seed, runner=self.runner)
        except failures.Unusable:
            return []
        finally:
            self._write(self.cells)

    def _tampering(self) -> str:
        """Return how the code went round the process group, or "" if it did not. If it did, restart the ranks."""
        refused = [what for each in self.gates for what in each.refused]
        connected = self.meter is not None and self.meter.found_others
        if not self.rejected and not refused and not connected:
            return ""
        ranks.current().restart()
        if self.meter and connected:
            self.meter.found_others = False
            return "void: the code made connections between ranks that belong to no process group"
        if refused:
            for each in self.gates:
                each.refused.clear()
            return f"void: the code used the process group's store, which is not allowed: {refused[0]}"
        names = ", ".join(sorted(set(self.rejected)))
        self.rejected.clear()
        return f"void: the code sent the grading process a pickle that would call {names} there"


if __name__ == "__main__":
    main(*sys.argv[1:])
