"""The cell magic `%%ranks`: runs a cell on every rank and shows the output in rank order, with equal outputs merged.

%%ranks                  on every rank
%%ranks 0,2              on ranks 0 and 2
%%ranks --timeout 20     stopped after 20 s instead of 60
"""

import argparse
import contextlib
import re
import sys

from IPython import get_ipython
from IPython.core.error import UsageError
from IPython.display import clear_output, display

from shared.ranks import reader
from shared.ranks.diagnosis import name_ranks, table_as_html, table_as_text
from shared.ranks.errors import CellFailed
from shared.ranks.running import DEFAULT_TIMEOUT_S, current, find
from shared.tables import Table, render

# -- explain a NameError that comes from the other side: the notebook and the ranks are different processes
#
# A name may exist on the ranks but not in the notebook, or the other way round. One sentence below the error says so.


_READY_ON_RANKS = ("rank", "world_size", "device", "dist", "torch")
_FIRST_CELLS = ("ranks", "check", "plots", "measure", "tables")
_MISSING = re.compile(r"NameError: name '(\w+)' is not defined")


def explain_in_notebook() -> None:
    """Add the sentence to every NameError of this notebook. Does nothing outside a notebook."""
    shell = get_ipython()
    if hasattr(shell, "kernel"):
        shell.set_custom_exc((NameError,), _with_sentence)


def _with_sentence(shell, kind, error, traceback, tb_offset=None) -> list[str]:
    """Return the traceback as IPython shows it, and the sentence."""
    shown = shell.InteractiveTB.structured_traceback(kind, error, traceback, tb_offset=tb_offset)
    sentence = missing_in_notebook(getattr(error, "name", None) or "")
    shell._showtraceback(kind, error, [*shown, sentence] if sentence else shown)
    return shown


def missing_in_notebook(name: str) -> str:
    """Return what to do about a name that the notebook lacks, or "" if the ranks lack it, too."""
    running = find()
    known = running.definitions if running is not None else None
    on_ranks = known is not None and (name in known.computed or any(name in cell.main_names for cell in known.cells))
    if on_ranks or name in _READY_ON_RANKS:
        others = {"dist": "It has no group here.", "torch": "`import torch` works here, too."}
        bring = others.get(name, f"`ranks.pull({name!r})` brings its values here.")
        return f"`{name}` exists on the ranks, and this cell runs in the notebook. Begin it with %%ranks. {bring}"
    if name in _FIRST_CELLS:
        return f"The first cells of the notebook define `{name}`. Run them first."
    return ""


def explain_on_ranks(failed: CellFailed) -> None:
    """Add to the error of a cell on the ranks what to do about a name that they lack."""
    missing = _MISSING.search(str(failed))
    shell = get_ipython()
    if not missing or shell is None:
        return
    if missing[1] in shell.user_ns:
        sentence = f"`{missing[1]}` exists in the notebook, not on the ranks. Import or define it in a %%ranks cell."
    else:
        sentence = f"If a %%ranks cell further up imports or defines `{missing[1]}`, run that cell first."
    failed.args = (f"{failed.args[0]}\n{sentence}",)


def register() -> None:
    """Register `%%ranks` in the notebook. Does nothing outside a notebook."""
    shell = get_ipython()
    if shell is not None:
        shell.register_magic_function(cell, "cell", "ranks")
        shell.register_magic_function(_misspelled, "cell", "rank")
        explain_in_notebook()


def _misspelled(line: str, source: str) -> None:
    raise UsageError("The first line is %%ranks, with an s: %%ranks 0 runs a cell on rank 0 only.")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise UsageError(f"%%ranks: {message}. Write %%ranks, %%ranks 0,2 or %%ranks --timeout 20")


def parse(line: str, world_size: int) -> tuple[list[int] | None, float]:
    """Read the magic's line. Returns the ranks it names (None for all) and the deadline in seconds."""
    parser = _Parser(add_help=False)
    parser.add_argument("ranks", nargs="?", default="")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S)
    options = parser.parse_args(line.replace(", ", ",").split())
    if not 0 < options.timeout < float("inf"):
        raise UsageError(f"%%ranks: expected a timeout above 0 seconds, got {options.timeout:g}")
    if not options.ranks:
        return None, options.timeout
    try:
        targets = sorted({int(rank) for rank in options.ranks.split(",")})
    except ValueError:
        raise UsageError(f"%%ranks: {options.ranks!r} is not a list of ranks. Write %%ranks 0,2") from None
    if targets[0] < 0 or targets[-1] >= world_size:
        raise UsageError(f"%%ranks: the ranks are 0 to {world_size - 1}, got {options.ranks}")
    return targets, options.timeout


def cell(line: str, source: str) -> None:
    """Run a cell on the ranks. This is the magic itself."""
    from shared.ranks import rankside  # imports torch

    running = current()
    targets, timeout_s = parse(line, running.world_size)
    live_line = _LiveLine()
    source = _with_first_line(line, source)
    running.check_whole()  # a cell that cannot run defines nothing
    running.definitions.remember(source, targets)
    show, watch = live_line.replace_by, live_line.watch
    try:
        running.run(rankside.run_cell, (source,), targets=targets, timeout_s=timeout_s, show=show, watch=watch)
    except CellFailed as failed:
        explain_on_ranks(failed)
        if reader.present() and (table := table_as_text(failed.cell)):
            display({"text/html": table_as_html(failed.cell), "text/plain": table}, raw=True)
            failed.args = (failed.args[0].replace(f"\n\n{table}", "", 1),)  # once is enough
        raise


def _with_first_line(line: str, source: str) -> str:
    """Put a comment in place of `%%ranks`, so that line numbers agree with the notebook's.

    Another cell magic must stay first, so it gets no comment. (IPython would drop a blank line.)
    """
    return source if source.startswith("%%") else f"# %%ranks {line}\n{source}"


class _LiveLine:
    """Shows the elapsed seconds and the last printed line while a long cell runs.

    A program that executes notebooks does not get it, because it would keep the line as output.
    """

    def __init__(self):
        self._enabled = reader.present()
        self._shown = False

    def watch(self, seconds: float, positions: dict) -> None:
        if self._enabled:
            printed = next((p["printed"] for p in positions.values() if p and p["busy"] and p["printed"]), "")
            reader.show_live(f"running {seconds:.0f} s │ {printed}")
            self._shown = True

    def replace_by(self, outcomes: dict, world_size: int) -> None:
        if self._shown:
            clear_output()
        show(outcomes, world_size)


def merge(texts: dict[int, str]) -> list[tuple[list[int], str]]:
    """Group ranks that printed the same text, in order of their first rank, leaving out ranks that printed nothing."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(texts):
        if texts[rank].strip():
            groups.setdefault(texts[rank], []).append(rank)
    return [(members, text) for text, members in groups.items()]


def labelled(texts: dict[int, str]) -> list[str]:
    """Return the lines that the ranks printed, with `ranks 0–3 │ ` before each line."""
    groups = merge(texts)
    labels = [name_ranks(members) for members, _ in groups]
    width = max(map(len, labels), default=0)
    return [
        f"{label:<{width}} │ {line}".rstrip()
        for label, (_, text) in zip(labels, groups, strict=True)
        for line in text.rstrip("\n").split("\n")
    ]


def show(outcomes: dict, world_size: int) -> None:
    """Print what the ranks printed, then show their figures."""
    for line in labelled({rank: outcome.text for rank, outcome in outcomes.items()}):
        print(line)
    sys.stdout.flush()
    for rank in sorted(outcomes):
        for bundle in outcomes[rank].displays:
            if len(outcomes) > 1:
                print(f"rank {rank} │ shows:")
            display(bundle, raw=True)


@contextlib.contextmanager
def progress(world_size: int):
    """Show a progress bar while ranks start; the table of ranks replaces it."""
    handle = None
    if hasattr(get_ipython(), "kernel"):
        handle = display(_bar(world_size, 0), raw=True, display_id=True)

    def report(done: int) -> None:
        if handle is not None:
            handle.update(_bar(world_size, done), raw=True)

    yield report
    if handle is not None:
        handle.update({"text/plain": ""}, raw=True)


def _bar(world_size: int, done: int) -> dict:
    """Return a bar that is animated until the first rank is ready, and fills afterwards."""
    text = f"starting {world_size} ranks … {done} ready"
    bar = render(__package__, "starting.html", world_size=world_size, ready=done, text=text)
    return {"text/plain": text, "text/html": bar}


def show_table(running, note: str = "") -> None:
    """Show each rank's host, process, device and backend, and which measurements are valid here."""
    placement = running.placement
    backend = f"{placement.backend}, simulates NCCL" if placement.simulates else placement.backend
    shared_host = None if running.link else "this machine"
    rows = [
        [str(rank), shared_host or f"host{rank // running.ranks_per_host}", str(pid), device, backend]
        for rank, (pid, device) in enumerate(zip(running.pids, running.placement.devices, strict=True))
    ]
    notes = [running.placement.valid] + ([note] if note else [])
    table = Table(["rank", "host", "pid", "device", "backend"], rows, "\n".join(notes))
    if get_ipython() is None:
        print(table)
    else:
        display(table)
