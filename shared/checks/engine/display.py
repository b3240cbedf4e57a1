"""Display verdicts: as a small table in a notebook, and with the same words as plain text elsewhere."""

import contextlib
import threading
import time
from dataclasses import replace

from IPython import get_ipython
from IPython.display import clear_output, display

from shared.checks.engine.cells import Assistance
from shared.checks.engine.verdicts import SAME_AS, Verdict
from shared.progress.page import After
from shared.ranks import reader
from shared.tables import render


def as_text(verdicts: list[Verdict], headline: str = "", note: str = "") -> str:
    """Return the headline, a note below it, and the verdicts. The evidence and the hint follow a failed check."""
    lines = [line for line in (headline, note) if line]
    for verdict in shorten_repeated_evidence(verdicts):
        where = f" ({_where(verdict)})" if verdict.world_sizes else ""
        lines.append(f"{sign(verdict)} {verdict.exercise} · {verdict.check}{where}")
        lines += [f"    {line}" for line in (verdict.evidence + "\n" + verdict.hint).strip().splitlines()]
    return "\n".join(lines)


def shorten_repeated_evidence(verdicts: list[Verdict]) -> list[Verdict]:
    """Replace repeated evidence by a reference to the first check that gives it, as one mistake often fails several."""
    first_checks: dict[tuple, str] = {}
    shown = []
    for verdict in verdicts:
        words = (verdict.exercise, verdict.evidence, verdict.hint)
        if verdict.ran and verdict.evidence and not verdict.evidence.startswith(SAME_AS):
            first = first_checks.setdefault(words, verdict.check)
            if first != verdict.check:
                verdict = replace(verdict, evidence=f"{SAME_AS} “{first}”", hint="")
        shown.append(verdict)
    return shown


def as_html(verdicts: list[Verdict], headline: str = "", note: str = "", assistance: Assistance | None = None) -> str:
    """Return the headline, a note below it, a table of verdicts, and blocks to open with hints and original cells.

    Signs and words carry the meaning, so color is not needed.
    """
    shown = shorten_repeated_evidence(verdicts)
    missing = [verdict for verdict in shown if not verdict.passed]
    cause = next((verdict for verdict in missing if verdict.ran), None)
    # One mistake is one row: what it causes elsewhere is folded.
    rest = [verdict for verdict in missing if verdict is not (cause or missing[0])] if len(missing) > 2 else []
    return render(
        __package__,
        "verdicts.html",
        headline=headline,
        note=note,
        first=[verdict for verdict in shown if verdict not in rest],
        rest=rest,
        sign=sign,
        where=_where,
        assistance=assistance or Assistance(),
    )


def success_as_html(verdicts: list[Verdict], headline: str, note: str, after: After, ours: tuple[str, ...]) -> str:
    """Return the headline with the lab's points, a link to what comes next, the verdicts, and our version to open."""
    rows = as_html(verdicts, note=note)
    return render(__package__, "success.html", headline=headline, after=after, rows=rows, ours=ours)


def sign(verdict: Verdict) -> str:
    """Return the sign that stands for the result of a check."""
    if not verdict.ran:
        return "–"
    return "✓" if verdict.passed else "✗"


def _where(verdict: Verdict) -> str:
    if not verdict.world_sizes:
        return ""
    sizes = ", ".join(map(str, verdict.world_sizes))
    return f"{sizes} rank{'s' if verdict.world_sizes != (1,) else ''}"


@contextlib.contextmanager
def live():
    """Yield a function that shows, while a check runs, what it does, and for how long the checks have been running.

    A program that executes notebooks sees nothing.
    """
    if not reader.present():
        yield lambda text: None
        return
    began_s, doing, done, one_at_a_time = time.monotonic(), "", threading.Event(), threading.Lock()

    def report(text: str) -> None:
        nonlocal doing
        doing = text
        show_line()

    def show_line() -> None:
        seconds = time.monotonic() - began_s
        with one_at_a_time:
            reader.show_live(f"checking {doing}" + (f" · {seconds:.0f} s" if seconds >= 1 else ""))

    def keep_time() -> None:
        while not done.wait(1.0):
            if doing:
                show_line()

    clock = threading.Thread(target=keep_time, daemon=True)
    clock.start()
    try:
        yield report
    finally:
        done.set()
        clock.join()
        clear_output(wait=True)


def show_success(verdicts: list[Verdict], headline: str, note: str, after: After | None, ours: tuple[str, ...]) -> None:
    """Show that all checks have passed. Outside a lab, `after` is None, and the verdicts are shown as usual."""
    if after is None:
        show(verdicts, headline, note)
        return
    text = as_text(verdicts, " · ".join([headline, after.points, after.words]), note)
    display({"text/plain": text, "text/html": success_as_html(verdicts, headline, note, after, ours)}, raw=True)


def show_ours(sources: tuple[str, ...]) -> None:
    """Show our version of an exercise."""
    html = render(__package__, "ours.html", sources=sources)
    display({"text/plain": "\n\n".join(sources), "text/html": html}, raw=True)


def show(verdicts: list[Verdict], headline: str, note: str = "", assistance: Assistance | None = None) -> None:
    text = as_text(verdicts, headline, note)
    if get_ipython() is None:
        print(text)
    else:
        display({"text/plain": text, "text/html": as_html(verdicts, headline, note, assistance)}, raw=True)
