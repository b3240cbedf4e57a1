"""Run the instructor's checks on one student's code inside the sandbox, and report each result as soon as it is known.

    python -m instructor.grade.judge JOB.json FD

Results are written to the pipe FD as lines of JSON. If an exercise crashes this process, only its own verdict is
lost:

    {"ready": true}
    {"screened": {grade_id: why it was left out}, "notices": [...], "notes": [...]}
    {"begin": "ManualDDP"}
    {"done": "ManualDDP", "verdicts": [...], "reason": ""}     or {"broken": "ManualDDP", "reason": ...} as the last one
"""

import contextlib
import importlib
import io
import json
import os
import re
import sys
from pathlib import Path

from instructor.grade import fingerprints, guard, screen
from instructor.grade.limits import Limits, give_up_rights
from shared import ranks
from shared.checks.engine import candidate, framework
from shared.checks.engine.verdicts import Verdict, as_json
from shared.deadlines import scaled

NOT_ALLOWED = "Exercises must not use the checks, the grader or solutions that students do not have yet"
LOOK_TIMEOUT_S = scaled(20.0)
GIVEN = ("torch", "dist", "rank", "world_size", "device", "display", "get_ipython")
# Every `%%ranks` cell has these names (rankside.join), so code that works in a notebook works here.
PRELUDE = f"""from IPython import get_ipython
from IPython.display import display
locals().update({{name: get_ipython().user_ns[name] for name in {GIVEN[:5]}}})
"""
FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)  # These move to the top of the file.


def main(job_file: str, results: str) -> None:
    job = json.loads(Path(job_file).read_text())
    give_up_rights(Limits(**job["limits"]), job["user"])
    pipe = os.fdopen(int(results), "w", buffering=1)
    os.set_inheritable(pipe.fileno(), False)

    def report(**line) -> None:
        print(json.dumps(line), file=pipe)

    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(max(framework.WORLD_SIZES), detect_mismatch=False)
        rejected = guard.install()
        report(ready=True)  # From here on, any failure is caused by the student's code.
        try:
            Judge(job, report, rejected).run()
        finally:
            ranks.stop()


class Judge:
    """Judges one student's code and reports the results."""

    def __init__(self, job: dict, report, rejected: list[str]):
        self.job, self.report, self.rejected = job, report, rejected
        self.checks = f"shared.checks.{job['module']}"
        self.path = str(Path(os.environ["HOME"]) / "candidate.py")
        self.left_out: dict[str, str] = {}

    def run(self) -> None:
        before = ranks.run(fingerprints.take, self.checks)
        defined = self._load(self._screen())
        for task in self.job["tasks"]:
            self.report(begin=task["name"])
            try:
                verdicts, reason = self._judge(task, defined)
                reason = self._tampering(before) or reason
            except ranks.RanksError as error:
                self.report(broken=task["name"], reason=str(error).split(". ")[0])
                return  # Ranks are missing. The grader starts another judge for the remaining exercises.
            self.report(done=task["name"], verdicts=as_json(verdicts), reason=reason)

    def _screen(self) -> list[dict]:
        """Return the cells that may be loaded."""
        notices, kept = [], []
        given = "\n".join(cell["source"] for cell in self.job["cells"] if not cell["grade_id"])
        for cell in self.job["cells"]:
            name = cell["grade_id"]
            cell["source"] = screen.without_magics(cell["source"]) if name else cell["source"]
            why = screen.problem(cell["source"]) if name else ""
            if name and not why and (found := screen.forbidden(cell["source"], tuple(self.job["forbidden"]))):
                why = f"rejected: {', '.join(found)}. {NOT_ALLOWED}"
            if name and not why:
                notices += [f"{name}, {notice}" for notice in screen.notices(cell["source"], given)]
            if why:
                self.left_out[name] = why
            else:
                kept.append(cell)
        notes = [
            f"{name} is not defined in any exercise cell. Only these cells are graded, so define it in one of them"
            for name in screen.borrowed(kept, self.job["others"])
            if name not in GIVEN
        ]
        self.report(screened=dict(self.left_out), notices=notices, notes=notes)
        return kept

    def _load(self, cells: list[dict]) -> list[str]:
        """Write the cells into one file and return the names that it defines.

        A cell that fails is left out, just as a notebook can continue after a failed cell.
        """
        defined, why = self._try(cells)
        if not why:
            return defined
        kept: list[dict] = []
        for cell in cells:
            names, why = self._try([*kept, cell])
            if not why:
                kept, defined = [*kept, cell], names
            elif cell["grade_id"]:
                self.left_out[cell["grade_id"]] = f"its cell failed when it was loaded: {why}"
        self._write(kept)
        return defined

    def _try(self, cells: list[dict]) -> tuple[list[str], str]:
        """Return the names that these cells define, and the reason if they cannot be loaded."""
        self._write(cells)
        try:
            return ranks.run(candidate.names_in, self.path, timeout_s=framework.PROBE_TIMEOUT_S)[0], ""
        except ranks.CellFailed as failure:
            return [], failure.explanation

    def _write(self, cells: list[dict]) -> None:
        source = "\n\n\n".join(cell["source"] for cell in cells) + "\n"
        first = "\n".join(dict.fromkeys(FUTURE.findall(source)))
        Path(self.path).write_text(f"{first}\n{PRELUDE}\n\n{FUTURE.sub('', source)}")

    def _judge(self, task: dict, defined: list[str]) -> tuple[list[Verdict], str]:
        """Return the verdicts, or the reason why there are none."""
        exercise = getattr(importlib.import_module(self.checks), task["name"])
        left_out = [self.left_out[name] for name in task["cells"] if name in self.left_out]
        if left_out:
            return [], left_out[0]
        if not {exercise.piece, exercise.stands_in} & set(defined):
            return [], f"{exercise.piece} is not defined; its cell is missing or empty"
        try:
            return framework.run_exercise(exercise, self.path, graded=True), ""
        except framework.Unusable as error:
            return [], str(error)

    def _tampering(self, before: list[dict]) -> str:
        """Return what the code has replaced, or tried to run in this process, or "" if it did neither.

        After tampering, the ranks are restarted.
        """
        try:
            after = ranks.run(fingerprints.take, self.checks, timeout_s=LOOK_TIMEOUT_S)
            pairs = zip(before, after, strict=True)
            found = {name for earlier, now in pairs for name in fingerprints.replaced(earlier, now)}
        except ranks.CellFailed:
            found = {"the inspection of the ranks itself"}
        if not found and not self.rejected:
            return ""
        ranks.current().restart()
        if self.rejected:
            names = ", ".join(sorted(set(self.rejected)))
            self.rejected.clear()
            return f"void: the code sent the grading process a pickle that would call {names} there"
        shown = sorted(found)
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        return f"void: the code replaces functions that measure it: {', '.join(shown[:3])}{more}"


if __name__ == "__main__":
    main(*sys.argv[1:])
