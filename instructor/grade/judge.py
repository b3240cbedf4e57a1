"""Inside the sandbox: try one student's pieces by the instructor's checks, and tell what came of it line by line.

    python -m instructor.grade.judge JOB.json FD

What is told goes into the pipe FD as lines of JSON, each as soon as it is known, so that a piece that brings this
process down takes along its own verdict only:

    {"ready": true}
    {"screened": {grade_id: why it was left out}, "notices": [...], "notes": [...]}
    {"begin": "ManualDDP"}
    {"done": "ManualDDP", "verdicts": [...], "reason": ""}     or {"broken": "ManualDDP", "reason": ...}, and the end
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

LOOK_TIMEOUT_S = scaled(20.0)
GIVEN = ("torch", "dist", "rank", "world_size", "device", "display", "get_ipython")
# What every `%%ranks` cell may count on (rankside.join), so that what passes in a notebook passes here.
PRELUDE = f"""from IPython import get_ipython
from IPython.display import display
locals().update({{name: get_ipython().user_ns[name] for name in {GIVEN[:5]}}})
"""
FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)  # of any cell: in a file it must come first


def main(job_file: str, results: str) -> None:
    job = json.loads(Path(job_file).read_text())
    give_up_rights(Limits(**job["limits"]), job["user"])
    pipe = os.fdopen(int(results), "w", buffering=1)
    os.set_inheritable(pipe.fileno(), False)

    def say(**line) -> None:
        print(json.dumps(line), file=pipe)

    with contextlib.redirect_stdout(io.StringIO()):
        ranks.start(max(framework.WORLD_SIZES), detect_mismatch=False)
        refused = guard.install()
        say(ready=True)  # what goes wrong from here on is the student's
        try:
            Judge(job, say, refused).run()
        finally:
            ranks.stop()


class Judge:
    """One student's pieces, and where to say what they are worth."""

    def __init__(self, job: dict, say, refused: list[str]):
        self.job, self.say, self.refused = job, say, refused
        self.checks = f"shared.checks.{job['module']}"
        self.path = str(Path(os.environ["HOME"]) / "candidate.py")
        self.left_out: dict[str, str] = {}

    def run(self) -> None:
        before = ranks.run(fingerprints.take, self.checks)
        defined = self._load(self._screen())
        for task in self.job["tasks"]:
            self.say(begin=task["name"])
            try:
                verdicts, reason = self._judge(task, defined)
                reason = self._tampering(before) or reason
            except ranks.RanksError as error:
                self.say(broken=task["name"], reason=str(error).split(". ")[0])
                return  # the ranks are not whole: whoever reads this starts another judge for the rest
            self.say(done=task["name"], verdicts=as_json(verdicts), reason=reason)

    def _screen(self) -> list[dict]:
        """→ the cells that may be loaded"""
        notices, kept = [], []
        given = "\n".join(cell["source"] for cell in self.job["cells"] if not cell["grade_id"])
        for cell in self.job["cells"]:
            name = cell["grade_id"]
            cell["source"] = screen.without_magics(cell["source"]) if name else cell["source"]
            why = screen.problem(cell["source"]) if name else ""
            if name and not why and (found := screen.refusals(cell["source"], tuple(self.job["forbidden"]))):
                why = f"refused: {', '.join(found)}, and grading takes only what is written by hand"
            if name and not why:
                notices += [f"{name}, {said}" for said in screen.notices(cell["source"], given)]
            if why:
                self.left_out[name] = why
            else:
                kept.append(cell)
        notes = [
            f"{name} is defined in no exercise's cell, and only those are graded: define it in one of them"
            for name in screen.borrowed(kept, self.job["others"])
            if name not in GIVEN
        ]
        self.say(screened=dict(self.left_out), notices=notices, notes=notes)
        return kept

    def _load(self, cells: list[dict]) -> list[str]:
        """Write the pieces into one file. A cell that does not load is left out, as a notebook goes on after it.

        → what the file defines
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
                self.left_out[cell["grade_id"]] = f"its cell does not load: {why}"
        self._write(kept)
        return defined

    def _try(self, cells: list[dict]) -> tuple[list[str], str]:
        """→ what these cells define, and why they cannot be loaded"""
        self._write(cells)
        try:
            return ranks.run(candidate.names_in, self.path, timeout_s=framework.CHECK_TIMEOUT_S)[0], ""
        except ranks.CellFailed as failure:
            return [], failure.explanation

    def _write(self, cells: list[dict]) -> None:
        source = "\n\n\n".join(cell["source"] for cell in cells) + "\n"
        first = "\n".join(dict.fromkeys(FUTURE.findall(source)))
        Path(self.path).write_text(f"{first}\n{PRELUDE}\n\n{FUTURE.sub('', source)}")

    def _judge(self, task: dict, defined: list[str]) -> tuple[list[Verdict], str]:
        """→ verdicts, and why there are none"""
        exercise = getattr(importlib.import_module(self.checks), task["name"])
        left_out = [self.left_out[name] for name in task["cells"] if name in self.left_out]
        if left_out:
            return [], left_out[0]
        if not {exercise.piece, exercise.stands_in} & set(defined):
            return [], f"{exercise.piece} is not defined: its cell is missing or unwritten"
        try:
            return framework.run_exercise(exercise, self.path), ""
        except framework.Unusable as error:
            return [], str(error)

    def _tampering(self, before: list[dict]) -> str:
        """→ what the piece has replaced, or sent to run here; "" for honest work. The ranks are fresh after it."""
        try:
            after = ranks.run(fingerprints.take, self.checks, timeout_s=LOOK_TIMEOUT_S)
            pairs = zip(before, after, strict=True)
            found = {name for earlier, now in pairs for name in fingerprints.replaced(earlier, now)}
        except ranks.CellFailed:
            found = {"what looks at the ranks"}
        if not found and not self.refused:
            return ""
        ranks.current().restart()
        if self.refused:
            names = ", ".join(sorted(set(self.refused)))
            self.refused.clear()
            return f"void: it sent the judge a pickle that would run {names} there"
        shown = sorted(found)
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        return f"void: it replaces {', '.join(shown[:3])}{more}, which measures it"


if __name__ == "__main__":
    main(*sys.argv[1:])
