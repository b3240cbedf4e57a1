"""Real data that needs no download: handwritten digits and a text.

The digits come with scikit-learn (1,797 images of 8×8 pixels, Alpaydin & Kaynak 1998). The text comes with this course
(`texts/README.md`).
"""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

_TEXT = Path(__file__).resolve().parent / "texts" / "python_reference.txt"


def digits(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Load the handwritten digits. Pixels are scaled from 0–16 to 0–1.

    Shape: returns images [1797, 64] and labels [1797].
    """
    # This reads the file as scikit-learn's load_digits does, but without the second that importing scikit-learn takes.
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("scikit-learn, which has the digits, is not installed")
    folder = Path(spec.origin).parent
    table = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    return torch.tensor(table[:, :-1] / 16.0, dtype=dtype), torch.tensor(table[:, -1].astype(int))


def text() -> str:
    """Load the text: about 214,000 ASCII characters."""
    return _TEXT.read_text(encoding="utf-8")


class CharTokens:
    """The text with one token per character, the simplest tokenizer with which a model learns something.

    Attributes:
        tokens: A [len(text)] tensor.
        vocab_size: The number of different characters.
    """

    def __init__(self, source: str | None = None):
        source = text() if source is None else source
        self.characters = sorted(set(source))
        self.vocab_size = len(self.characters)
        self._token_of = {character: token for token, character in enumerate(self.characters)}
        self.tokens = self.encode(source)

    def encode(self, piece: str) -> torch.Tensor:
        """Convert text to tokens. Shape: returns [len(piece)]."""
        return torch.tensor([self._token_of[character] for character in piece])

    def decode(self, tokens: torch.Tensor) -> str:
        return "".join(self.characters[token] for token in tokens.tolist())

    def window(self, start: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one training sample: `length` tokens as inputs, and the same tokens shifted by one as targets.

        Shape: returns inputs [length] and targets [length].

        Raises:
            ValueError: If the window extends past the end of the text.
        """
        if not 0 <= start < len(self.tokens) - length:
            raise ValueError(
                f"a window of {length} + 1 tokens at index {start} does not fit into {len(self.tokens)} tokens"
            )
        return self.tokens[start : start + length], self.tokens[start + 1 : start + length + 1]

    def windows(self, starts, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a batch of samples.

        Shape: returns inputs [len(starts), length] and targets [len(starts), length].
        """
        pairs = [self.window(int(start), length) for start in starts]
        return torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
