"""Real data that needs no download: handwritten digits, and a text.

The digits ship inside scikit-learn (1,797 images of 8×8, Alpaydin & Kaynak 1998). The text ships with
this course (`texts/README.md`).
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

_TEXT = Path(__file__).resolve().parent / "texts" / "python_reference.txt"


def digits(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the handwritten digits.

    Shapes: → images [1797, 64], labels [1797]
    Units: pixels are scaled from 0–16 to 0–1.
    """
    # Read as scikit-learn's load_digits does, without the second that every rank would take to import it.
    folder = Path(find_spec("sklearn").origin).parent
    table = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return torch.tensor(table[:, :-1] / 16.0, dtype=dtype), torch.tensor(table[:, -1].astype(int))


def text() -> str:
    """Load the text, about 230,000 characters of ASCII."""
    return _TEXT.read_text()


class CharTokens:
    """The text as one token per character: the simplest tokenizer that learns something.

    `tokens` is a [len(text)] tensor; `vocab_size` the number of different characters.
    """

    def __init__(self, source: str | None = None):
        source = text() if source is None else source
        self.characters = sorted(set(source))
        self.vocab_size = len(self.characters)
        self._number = {character: number for number, character in enumerate(self.characters)}
        self.tokens = self.encode(source)

    def encode(self, piece: str) -> torch.Tensor:
        """Shapes: → [len(piece)]"""
        return torch.tensor([self._number[character] for character in piece])

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.characters[number] for number in tokens.tolist())

    def window(self, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut one training sample: `length` tokens, and the same moved on by one as targets.

        Shapes: → inputs [length], targets [length]
        Raises: ValueError when the window runs past the end.
        """
        if not 0 <= start < len(self.tokens) - length:
            raise ValueError(f"a window of {length} from {start} does not fit into {len(self.tokens)} tokens")
        return self.tokens[start : start + length], self.tokens[start + 1 : start + length + 1]

    def windows(self, starts, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut a batch of samples. Shapes: → inputs [len(starts), length], targets [len(starts), length]"""
        pairs = [self.window(int(start), length) for start in starts]
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
