"""How verdicts look: a small table in a notebook, the same words as plain text elsewhere."""

from dataclasses import replace

from IPython import get_ipython
from IPython.display import display

from shared.checks.engine.verdicts import Verdict
from shared.tables.rendering import render


def as_text(verdicts: list[Verdict]) -> str:
    """Write verdicts as lines: what was checked, and under a failure the evidence and the hint."""
    lines = []
    for verdict in said_once(verdicts):
        where = f" ({_where(verdict)})" if verdict.world_sizes else ""
        lines.append(f"{_sign(verdict)} {verdict.exercise} · {verdict.check}{where}")
        lines += [f"    {line}" for line in (verdict.evidence + "\n" + verdict.hint).strip().splitlines()]
    return "\n".join(lines)


def said_once(verdicts: list[Verdict]) -> list[Verdict]:
    """One mistake may fail every check in the same words: say them at the first."""
    message: dict[tuple, str] = {}
    shown = []
    for verdict in verdicts:
        words = (verdict.exercise, verdict.evidence, verdict.hint)
        if verdict.evidence and words in message:
            verdict = replace(verdict, evidence=f"as in: {message[words]}", hint="")
        else:
            message[words] = verdict.check
        shown.append(verdict)
    return shown


def as_html(verdicts: list[Verdict]) -> str:
    """Write verdicts as a table. Sign and words carry the meaning, color only helps."""
    return render(__package__, "verdicts.html", verdicts=said_once(verdicts), sign=_sign, where=_where)


def _sign(verdict: Verdict) -> str:
    return "✓" if verdict.passed else "✗"


def _where(verdict: Verdict) -> str:
    if not verdict.world_sizes:
        return ""
    sizes = ", ".join(map(str, verdict.world_sizes))
    return f"{sizes} rank{'s' if verdict.world_sizes != (1,) else ''}"


def show(verdicts: list[Verdict]) -> None:
    if get_ipython() is None:
        print(as_text(verdicts))
    else:
        display({"text/plain": as_text(verdicts), "text/html": as_html(verdicts)}, raw=True)
