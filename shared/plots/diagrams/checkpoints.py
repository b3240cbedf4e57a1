"""Diagrams of checkpoints: an atomic save, what a kill leaves of it, and a save in the background."""

from dataclasses import dataclass

from matplotlib.figure import Figure

from shared.plots import rank_color, rank_ink
from shared.plots.diagrams.drawing import CELL_IN, COMPUTE, OWN_RANK, WAITS, Clock, Drawing

_WRITTEN_MS = (40.0, 45.0, 50.0, 60.0)  # when each rank has written and flushed its shard
_METADATA_MS, _RENAMED_MS, _ENDED_MS = 80.0, 90.0, 115.0
_KILLS_MS = {"A": 56.0, "B": 85.0, "C": 110.0}
_PREVIOUS, _STEP = "step_2", "step_4"
_STEP_MS, _STAGING_MS, _WRITING_MS, _RENAMING_MS = 20.0, 14.0, 50.0, 3.0
_SAVED_AT, _LAST_STEP = 10, 13  # the step of the checkpoint, and the last one that is drawn
_RENAMES = "renames"


@dataclass(frozen=True)
class Checkpoint:
    """A folder that is left after a kill.

    Attributes:
        name: The folder's name.
        ranks: The ranks whose shards are complete.
        partial: The ranks whose shards were being written.
        metadata: Whether the folder has .metadata.
    """

    name: str
    ranks: tuple[int, ...]
    partial: tuple[int, ...]
    metadata: bool


def left_by_a_kill(killed_ms: float) -> list[Checkpoint]:
    """Compute which folders are there after a kill, in ms since the save of step 4 began."""
    everyone = tuple(range(len(_WRITTEN_MS)))
    written = tuple(rank for rank in everyone if _WRITTEN_MS[rank] <= killed_ms)
    name = _STEP if killed_ms >= _RENAMED_MS else f"{_STEP}.half"
    partial = tuple(rank for rank in everyone if rank not in written)
    return [Checkpoint(_PREVIOUS, everyone, (), True), Checkpoint(name, written, partial, killed_ms >= _METADATA_MS)]


def newest(folders: list[Checkpoint]) -> str:
    """Return the checkpoint that a run resumes from: the largest step among the names without a suffix."""
    steps = [folder.name.removeprefix("step_") for folder in folders]
    return f"step_{max(int(step) for step in steps if step.isdigit())}"


def atomic_save() -> Figure:
    """Draw a save of four ranks that ends with a rename, and what a kill leaves before and after the rename."""
    drawing = Drawing(8.8, 6.3, "An atomic save: a rename turns an unfinished checkpoint into a complete one")
    clock = Clock(1.0, drawing.width_in - 0.2, 0, _ENDED_MS)
    slowest_ms, bottom = max(_WRITTEN_MS), 3.2
    for rank, written_ms in enumerate(_WRITTEN_MS):
        y, style = 0.95 + 0.48 * rank, {"facecolor": rank_color(rank), "ink": rank_ink(rank)}
        drawing.rank_label(0.15, y, rank)
        clock.span(drawing, y, (0, written_ms), "writes, flushes", CELL_IN[1], **style)
        if rank == 0:
            clock.span(drawing, y, (written_ms, slowest_ms), "waits", CELL_IN[1], **WAITS)
            clock.span(drawing, y, (slowest_ms, _METADATA_MS), ".metadata", CELL_IN[1], **style)
            clock.span(drawing, y, (_METADATA_MS, _RENAMED_MS), "", CELL_IN[1], **WAITS)
        else:
            clock.span(drawing, y, (written_ms, _RENAMED_MS), "waits", CELL_IN[1], **WAITS)
        clock.span(drawing, y, (_RENAMED_MS, _ENDED_MS), "continues", CELL_IN[1], **style)
    rename_x = clock.x(_RENAMED_MS)
    drawing.line((rename_x, 0.85), (rename_x, 2.95), linewidth=2.4, color="black")
    drawing.text(rename_x, 3.1, "rank 0 renames step_4.half to step_4", weight="bold")
    drawing.arrow((clock.left_in, 3.1), (4.5, 3.1))
    drawing.text(4.6, 3.1, "time", "note", ha="left")
    column = (drawing.width_in - 0.3) / len(_KILLS_MS)
    moments = {
        "while ranks write": "Shard 3 is incomplete.",
        "after all have written": "All files are there, but not the name.",
        "after the rename": "Both checkpoints are complete.",
    }
    for index, ((letter, killed_ms), moment) in enumerate(zip(_KILLS_MS.items(), moments, strict=True)):
        x = clock.x(killed_ms)
        drawing.line((x, 0.75), (x, 2.9), linestyle="--", linewidth=1.6, color="black")
        drawing.text(x, 0.62, f"kill {letter}", weight="bold")
        folder_x, folder_y = 0.15 + column * index, bottom + 0.2
        drawing.box(folder_x, folder_y, column - 0.1, 2.7)
        drawing.text(folder_x + (column - 0.1) / 2, folder_y + 0.2, f"kill {letter}: {moment}", weight="bold")
        _draw_folder(drawing, folder_x + 0.12, folder_y + 0.45, left_by_a_kill(killed_ms))
        drawing.text(folder_x + 0.12, folder_y + 2.14, moments[moment], "note", ha="left")
    return drawing.finish()


def _draw_folder(drawing: Drawing, x: float, y: float, folders: list[Checkpoint]) -> None:
    for index, folder in enumerate(folders):
        top = y + 0.82 * index
        drawing.code(x, top + 0.1, folder.name, ha="left")
        for rank in range(len(_WRITTEN_MS)):
            cell = x + 0.36 * rank, top + 0.26
            if rank in folder.ranks:
                drawing.cell(*cell, f"{rank}", (rank,), (0.36, CELL_IN[1]))
            else:
                drawing.absent(*cell, (0.36, CELL_IN[1]))
                drawing.cell(*cell, f"{rank}", (rank,), (0.18, CELL_IN[1]))
        size_in = (0.95, CELL_IN[1])
        if folder.metadata:
            drawing.cell(x + 1.54, top + 0.26, ".metadata", (), size_in)
        else:
            drawing.absent(x + 1.54, top + 0.26, size_in)
    drawing.text(x, y + 2.0, "resumes from", ha="left")
    drawing.code(x + 1.08, y + 2.0, newest(folders), ha="left", weight="bold")


@dataclass(frozen=True)
class Span:
    """What a rank does, and when, in ms."""

    name: str
    began_ms: float
    ended_ms: float


class SavingRun:
    """Trains on one rank, saves after one of the steps, and records what its threads do when.

    Attributes:
        main: What the training thread does: steps, staging or writing, the rename.
        thread: What the background thread does.
        copied_ms: When a copy of the shards is created, and when it is freed.
    """

    def __init__(self, in_background: bool):
        self.main: list[Span] = []
        self.thread: list[Span] = []
        self.copied_ms = (0.0, 0.0)
        for step in range(_SAVED_AT - 1, _LAST_STEP + 1):
            self._run(f"step {step}", _STEP_MS)
            if step == _SAVED_AT and in_background:
                self._run("stages", _STAGING_MS)
                staged = self.main[-1]
                self.thread.append(Span("writes, flushes", staged.ended_ms, staged.ended_ms + _WRITING_MS))
                self.copied_ms = staged.began_ms, self.thread[-1].ended_ms
            elif step == _SAVED_AT:
                self._run("writes, flushes", _WRITING_MS)
                self._run(_RENAMES, _RENAMING_MS)
        if in_background:
            self._run(_RENAMES, _RENAMING_MS)

    def _run(self, name: str, lasts_ms: float) -> None:
        began_ms = self.main[-1].ended_ms if self.main else 0.0
        self.main.append(Span(name, began_ms, began_ms + lasts_ms))

    @property
    def completed_ms(self) -> float:
        return next(span.ended_ms for span in self.main if span.name == _RENAMES)

    @property
    def blocked_ms(self) -> float:
        """Return how long training is blocked."""
        return sum(span.ended_ms - span.began_ms for span in self.main if not span.name.startswith("step"))


def background_save() -> Figure:
    """Draw a save that training waits for, and one in which a background thread writes a copy, on one rank."""
    waiting, background = SavingRun(in_background=False), SavingRun(in_background=True)
    drawing = Drawing(8.8, 5.3, f"Saving after step {_SAVED_AT}: training waits, or a thread writes a copy")
    clock = Clock(1.75, drawing.width_in - 0.3, 0, waiting.main[-1].ended_ms)
    own = {"facecolor": rank_color(OWN_RANK), "ink": rank_ink(OWN_RANK)}
    _draw_training(drawing, clock, 1.1, waiting, "save")
    _draw_training(drawing, clock, 2.4, background, "async_save")
    drawing.text(0.15, 3.45, "thread", ha="left")
    for span in background.thread:
        clock.span(drawing, 3.26, (span.began_ms, span.ended_ms), span.name, CELL_IN[1], **own)
    drawing.text(0.15, 4.05, "CPU memory", ha="left")
    clock.span(drawing, 3.86, background.copied_ms, f"copy of the shards after step {_SAVED_AT}", CELL_IN[1], **own)
    clock.axis(drawing, 4.6, [0.0, background.copied_ms[0], waiting.main[-1].ended_ms])
    words = (
        f"Hatched: training is blocked ({_RENAMING_MS:.0f} ms for the rename, between two steps). "
        "Both checkpoints hold the same values."
    )
    drawing.text(0.15, 5.1, words, "note", ha="left")
    return drawing.finish()


def _draw_training(drawing: Drawing, clock: Clock, y: float, run: SavingRun, name: str) -> None:
    drawing.code(0.15, y - 0.2, name, ha="left", weight="bold")
    drawing.text(0.15, y + 0.19, "training", ha="left")
    for span in run.main:
        style = {"facecolor": COMPUTE} if span.name.startswith("step") else WAITS
        words = span.name if span.name != _RENAMES else ""  # too short for words
        clock.span(drawing, y, (span.began_ms, span.ended_ms), words, CELL_IN[1], **style)
    complete_x = clock.x(run.completed_ms)
    drawing.line((complete_x, y - 0.1), (complete_x, y + 0.48), linewidth=2.4, color="black")
    drawing.text(complete_x, y - 0.22, f"renamed to step_{_SAVED_AT}", weight="bold")
    blocks = [span for span in run.main if not span.name.startswith("step")]
    parts = " + ".join(f"{span.ended_ms - span.began_ms:.0f}" for span in blocks)
    words = f"blocked for {parts} = {run.blocked_ms:.0f} ms"
    drawing.text(clock.x(run.main[2].began_ms), y + 0.6, words, ha="left")
