"""A training step as a job: forward, backward, and waiting for the gradients. And what a step costs besides time."""

import contextlib
from dataclasses import dataclass

from torch import nn

from shared import memory, timeline, wire
from shared.measure.rounds import Job, recorded


def training_step(model, *batch, sync: bool = True) -> Job:
    """Make a job of a training step without the optimizer, in the phases "forward", "backward" and "finish".

    Args:
        model: Returns the loss. If it has finish_gradient_sync(), the last phase calls it.
        sync: Whether gradients are averaged. If not, forward and backward run inside the model's no_sync(), and the
            last phase does nothing. That is the same step without communication.
    """
    losses = []

    def prepare() -> None:
        losses.clear()
        model.zero_grad(set_to_none=True)

    def forward() -> None:
        with _communicating(model, sync):
            losses.append(model(*batch))

    def backward() -> None:
        with _communicating(model, sync):
            losses[0].backward()

    def finish() -> None:
        if sync and hasattr(model, "finish_gradient_sync"):
            model.finish_gradient_sync()

    return Job({"forward": forward, "backward": backward, "finish": finish}, prepare)


def _communicating(model, sync: bool):
    return contextlib.nullcontext() if sync else model.no_sync()


def recorded_step(model: nn.Module, *batch, rounds: int = 7) -> list[timeline.Timeline]:
    """Record training steps. Returns the one with rank 0's median exposed time, as one timeline per rank."""
    step = {"": training_step(model, *batch)}
    return recorded(step, lambda: timeline.record(model), by=lambda line: line.exposed_ms, rounds=rounds)[""]


def train_step(model, optimizer, *batch) -> float:
    """Take one training step, and return this rank's loss.

    Args:
        model: Returns the loss. If it has finish_gradient_sync(), that is called after backward.
    """
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    if hasattr(model, "finish_gradient_sync"):
        model.finish_gradient_sync()
    optimizer.step()
    return loss.item()


@dataclass(frozen=True)
class Costs:
    """What one training step needs on this rank, except time.

    Attributes:
        held: The bytes that the rank holds before the step, including the gradients of the step before.
    """

    held: memory.Held
    peak: memory.Peak
    log: wire.Ledger


def costs(model: nn.Module, optimizer, *batch) -> Costs:
    """Train for two steps, and return the costs of the second one, because the first one creates optimizer state."""
    train_step(model, optimizer, *batch)
    held = memory.held(model, optimizer)
    with memory.peak(model, optimizer) as peak, wire.ledger() as log:
        train_step(model, optimizer, *batch)
    return Costs(held, peak, log)
