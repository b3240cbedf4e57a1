"""Errors about ranks. A notebook shows their message without the course's own traceback."""

from shared.ranks.diagnosis import CellState


class RanksError(RuntimeError):
    """An error about the ranks, with a message for the student."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class CellFailed(RanksError):
    """A cell failed, hung or was interrupted on some rank.

    Attributes:
        outcomes: The outcome of each rank whose cell ended.
        cell: What the doctor knew about every rank.
        restarted: Whether the ranks were restarted, so that only what their cells define is left.
    """

    def __init__(self, explanation: str, outcomes: dict, cell: CellState, recovery: str, restarted: bool):
        super().__init__(f"{explanation}\n{recovery}")
        self.explanation = explanation
        self.outcomes = outcomes
        self.cell = cell
        self.restarted = restarted
