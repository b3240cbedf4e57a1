"""How verdicts look: a small table in a notebook, the same words as plain text elsewhere."""

import html
from dataclasses import replace

from IPython import get_ipython
from IPython.display import display

from shared.checks.engine.verdicts import Verdict

_PASSED, _FAILED = "✓", "✗"
_GREEN, _RED = "#1a7f37", "#d4483b"  # each can be told from JupyterLab's light ground and from its dark one


def as_text(verdicts: list[Verdict]) -> str:
    """Write verdicts as lines: what was checked, and under a failure the evidence and the hint."""
    lines = []
    for verdict in said_once(verdicts):
        lines.append(f"{_PASSED if verdict.passed else _FAILED} {verdict.exercise} · {verdict.check}{_where(verdict)}")
        lines += [f"    {line}" for line in (verdict.evidence + "\n" + verdict.hint).strip().splitlines()]
    return "\n".join(lines)


def said_once(verdicts: list[Verdict]) -> list[Verdict]:
    """One mistake may fail every check in the same words: say them at the first."""
    said: dict[tuple, str] = {}
    shown = []
    for verdict in verdicts:
        words = (verdict.exercise, verdict.evidence, verdict.hint)
        if verdict.evidence and words in said:
            verdict = replace(verdict, evidence=f"as in: {said[words]}", hint="")
        else:
            said[words] = verdict.check
        shown.append(verdict)
    return shown


def as_html(verdicts: list[Verdict]) -> str:
    """Write verdicts as a table; sign and words carry the meaning, colour only helps."""
    rows = []
    for verdict in said_once(verdicts):
        colour = _GREEN if verdict.passed else _RED
        sign = f"<td style='color:{colour};font-weight:bold'>{_PASSED if verdict.passed else _FAILED}</td>"
        name = f"<td style='text-align:left;white-space:nowrap'>{html.escape(verdict.exercise)} · {verdict.check}</td>"
        said = _unbroken(verdict.evidence) if verdict.evidence else ""
        hint = f"<div style='margin-top:4px'><i>{html.escape(verdict.hint)}</i></div>" if verdict.hint else ""
        evidence = f"<pre style='white-space:pre-wrap;margin:0;background:none'>{said}</pre>"
        text = f"<td style='text-align:left'>{evidence}{hint}</td>"
        where = f"<td style='text-align:left;white-space:nowrap'>{_where(verdict).strip(' ()')}</td>"
        rows.append(f"<tr style='vertical-align:top'>{sign}{name}{where}{text}</tr>")
    return f"<table>{''.join(rows)}</table>"


def _unbroken(text: str) -> str:
    """Let lines end between words, where JupyterLab would break them anywhere."""
    return f"<span style='word-break:normal;overflow-wrap:anywhere'>{html.escape(text)}</span>"


def _where(verdict: Verdict) -> str:
    if not verdict.world_sizes:
        return ""
    sizes = ", ".join(map(str, verdict.world_sizes))
    return f" ({sizes} rank{'s' if verdict.world_sizes != (1,) else ''})"


def show(verdicts: list[Verdict]) -> None:
    if get_ipython() is None:
        print(as_text(verdicts))
    else:
        display({"text/plain": as_text(verdicts), "text/html": as_html(verdicts)}, raw=True)
