"""What the student's code prints while a check runs it, in a few lines."""

from dataclasses import dataclass

from shared.ranks import magic

MOST_LINES = 12  # per rank


@dataclass
class Prints:
    """Keeps the prints of one run: of the first check that fails, or else of the first that prints anything."""

    check: str = ""
    world_size: int = 0
    texts: dict[int, str] | None = None
    failed: bool = False

    def add(self, check: str, world_size: int, texts: dict[int, str], failed: bool) -> None:
        """Offer what the ranks printed in the last run of a check's probe that printed anything."""
        if texts and (self.texts is None or (failed and not self.failed)):
            self.check, self.world_size, self.texts, self.failed = check, world_size, texts, failed

    def show(self) -> None:
        """Print the first lines of each rank, merged where ranks agree."""
        if self.texts is None:
            return
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        print(f"Your code printed this in the check “{self.check}”, on {ranks}:")
        for line in magic.labelled({rank: _first_lines(text) for rank, text in self.texts.items()}):
            print(line)


def _first_lines(text: str) -> str:
    lines = text.rstrip("\n").split("\n")
    more = len(lines) - MOST_LINES
    return "\n".join([*lines[:MOST_LINES], f"… {more} more lines not shown"] if more > 1 else lines)
