"""What can go wrong with ranks, said in full sentences: a notebook shows them without our traceback."""

from shared.ranks.diagnosis import Case


class RanksError(RuntimeError):
    """Something about the ranks that a student should read."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


class CellFailed(RanksError):
    """A cell failed, hung, or was interrupted on some rank.

    outcomes: what each rank came to; case: all that the doctor knew; restarted: whether variables are gone.
    """

    def __init__(self, explanation: str, outcomes: dict, case: Case, what_is_left: str, restarted: bool):
        super().__init__(f"{explanation}\n{what_is_left}")
        self.explanation = explanation
        self.outcomes = outcomes
        self.case = case
        self.restarted = restarted
