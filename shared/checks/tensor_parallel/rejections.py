"""Sizes that the ranks cannot divide evenly are rejected with an error that names the numbers."""

import re

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
from shared.models import GatedMLP, GPTConfig, GroupedAttention, TinyGPT


def probe_rejection(piece, what: str, size: int) -> str:
    """Let the piece split something of this size. Returns what it raised, or "" if it raised nothing."""
    torch.manual_seed(0)  # a layer must be the same on every rank
    build = {
        "outputs": lambda: piece.from_linear(nn.Linear(4, size).to(device_here())),
        "inputs": lambda: piece.from_linear(nn.Linear(size, 4).to(device_here())),
        "inner elements": lambda: piece.from_mlp(GatedMLP(4, size).to(device_here())),
        "query heads": lambda: piece.from_attention(GroupedAttention(2 * size, size, 1).to(device_here())),
        "kv heads": lambda: piece.from_attention(GroupedAttention(24 * size, 12 * size, size).to(device_here())),
        "heads of a GPT": lambda: piece(TinyGPT(GPTConfig(12, 12, 1, size, 12 * size)).to(device_here())),
        "tokens of a GPT": lambda: _run_tokens(piece, size),
    }
    try:
        build[what]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _run_tokens(parallelize, tokens: int) -> None:
    model = parallelize(TinyGPT(GPTConfig(12, 64, 1, 12, 12)).to(device_here()), sequence_parallel=True)
    model(torch.zeros(2, tokens, dtype=torch.long, device=device_here()))


def _judge(attempt: Attempt, what: str) -> None:
    size = attempt.world_size * attempt.random.randint(2, 9) + attempt.random.randint(1, attempt.world_size - 1)
    context = f"{size} {what} on {attempt.world_size} ranks"
    for rank, message in enumerate(attempt.run(probe_rejection, what, size, context=context)):
        numbers = {int(number) for number in re.findall(r"\d+", message)}
        if not message.startswith("ValueError: ") or not {size, attempt.world_size} <= numbers:
            raised = f"your code raised {message}" if message else "your code raised no error"
            wanted = f"expected a ValueError that names {size} and {attempt.world_size}"
            raise Wrong({rank: f"{context}: {raised}; {wanted}"}, "Hint: which given function raises this error?")


def outputs_that_do_not_divide(attempt: Attempt) -> None:
    _judge(attempt, "outputs")


def inputs_that_do_not_divide(attempt: Attempt) -> None:
    _judge(attempt, "inputs")


def inner_elements_that_do_not_divide(attempt: Attempt) -> None:
    _judge(attempt, "inner elements")


def heads_that_do_not_divide(attempt: Attempt) -> None:
    _judge(attempt, "query heads")
    _judge(attempt, "kv heads")


def a_gpt_that_does_not_divide(attempt: Attempt) -> None:
    _judge(attempt, "heads of a GPT")
    _judge(attempt, "tokens of a GPT")
