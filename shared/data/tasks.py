"""What to train: a module and its data, by name."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from shared.data import CharTokens, digits
from shared.models import MLP, GPTConfig, TinyGPT


class Task(NamedTuple):
    """A classifier and its samples.

    pick: numbers of samples, each below length → inputs, targets; module(inputs) is one row of logits per target.
    """

    module: nn.Module
    length: int
    pick: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def mlp(seed: int, dtype: torch.dtype) -> Task:
    """Read handwritten digits."""
    images, labels = digits(dtype)
    return Task(MLP(seed=seed).to(dtype), len(images), lambda numbers: (images[numbers], labels[numbers]))


def gpt(seed: int, dtype: torch.dtype, config: GPTConfig | None = None) -> Task:
    """Guess each next character of a text."""
    text = CharTokens()
    config = config or GPTConfig(vocab_size=text.vocab_size)
    starts = len(text.tokens) - config.context
    return Task(TinyGPT(config, seed).to(dtype), starts, lambda numbers: text.windows(numbers, config.context))


TASKS = {"mlp": mlp, "gpt": gpt}
