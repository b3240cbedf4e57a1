"""The tasks to train on, by name: a model and its data."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from shared.data import CharTokens, digits
from shared.models import MLP, GPTConfig, RotaryGPT, TinyGPT


class Task(NamedTuple):
    """A model and its training samples.

    Attributes:
        pick: Returns the inputs and targets of the samples with the given indices, each below `length`. module(inputs)
            returns one row of logits per target.
    """

    module: nn.Module
    length: int
    pick: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def mlp(seed: int, dtype: torch.dtype) -> Task:
    """Classify handwritten digits."""
    images, labels = digits(dtype)
    return Task(MLP(seed=seed).to(dtype), len(images), lambda indices: (images[indices], labels[indices]))


def gpt(seed: int, dtype: torch.dtype, config: GPTConfig | None = None, model_cls: type[TinyGPT] = TinyGPT) -> Task:
    """Predict the next character of a text."""
    text = CharTokens()
    config = config or GPTConfig(vocab_size=text.vocab_size)
    starts = len(text.tokens) - config.context
    return Task(model_cls(config, seed).to(dtype), starts, lambda indices: text.windows(indices, config.context))


def rotary_gpt(seed: int, dtype: torch.dtype, config: GPTConfig | None = None) -> Task:
    """Do what `gpt` does, with a model that rotates queries and keys."""
    return gpt(seed, dtype, config, RotaryGPT)


TASKS = {"mlp": mlp, "gpt": gpt, "rotary-gpt": rotary_gpt}
