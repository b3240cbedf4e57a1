"""Small GPTs in float64, for the checks of chapters that split a model. The ranks import this module."""

from dataclasses import dataclass

import torch
from torch import nn

from shared.models import GPTConfig, TinyGPT

TOKENS = 12


def seeded(seed: int, build):
    """Build a module in float64 from a seed, without changing the student's random numbers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().double()


@dataclass(frozen=True)
class SmallGPT:
    """The sizes of a TinyGPT, and how its weights begin.

    Attributes:
        tied: Whether the output layer shares its weight with the token embedding.
        alike: Whether the two begin with the same values if they are not tied.
        biases: Whether the linear layers have biases.
    """

    layers: int = 2
    heads: int = 12
    head_width: int = 1
    vocabulary: int = 24
    tied: bool = True
    alike: bool = False
    biases: bool = False

    @property
    def width(self) -> int:
        return self.heads * self.head_width

    def build_model(self, seed: int) -> TinyGPT:
        """Build the whole model. It takes sequences of up to 2 · TOKENS tokens."""
        return seeded(seed, lambda: self._build(seed))

    def _build(self, seed: int) -> TinyGPT:
        config = GPTConfig(self.vocabulary, 2 * TOKENS, self.layers, self.heads, self.width)
        model = TinyGPT(config, seed)
        if self.biases:
            for block in model.blocks:
                for owner, name in (
                    (block, "up"),
                    (block, "down"),
                    (block.attention, "query_key_value"),
                    (block.attention, "project"),
                ):
                    whole = getattr(owner, name)
                    setattr(owner, name, nn.Linear(whole.in_features, whole.out_features))
        if not self.tied:
            model.output = nn.Linear(self.width, self.vocabulary, bias=self.biases)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        if self.alike:
            model.output.weight.data.copy_(model.token_embedding.weight)
        return model
