"""A training step as a job: forward, backward, and waiting for the gradients.

Also what a step costs besides time, and after which fraction of its computation gradients become ready.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from shared import memory, timeline, wire
from shared.measure.rounds import ROUNDS, WARM_UP_ROUNDS, Job, jobs, now_s, of_all_ranks, recorded


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


def ready_fractions(
    model: nn.Module, *batch, rounds: int = ROUNDS, warm_up_rounds: int = WARM_UP_ROUNDS
) -> list[tuple[float, int]]:
    """Measure when each gradient is ready in a step inside no_sync(). Runs on all ranks together.

    The step begins when the last rank enters it. A gradient is ready when all ranks have it, and the step ends with the
    last rank's backward. Every parameter must get a gradient.

    Returns:
        (fraction, size_bytes) of each gradient, in the order in which they are ready, the same on all ranks. The
        fraction is the median of the rounds.
    """
    parameters = list(model.parameters())
    step = training_step(model, *batch, sync=False)
    marks_s: list[list[float]] = []  # by round: when it began, when each gradient was ready, when it ended

    def run() -> None:
        marks = [now_s()] * (len(parameters) + 2)
        marks_s.append(marks)
        for phase in step.phases.values():
            phase()
        marks[-1] = now_s()

    def note(index: int) -> Callable[[nn.Parameter], None]:
        def on_gradient(_parameter: nn.Parameter) -> None:
            marks_s[-1][index] = now_s()

        return on_gradient

    handles = [
        parameter.register_post_accumulate_grad_hook(note(index)) for index, parameter in enumerate(parameters, 1)
    ]
    try:
        jobs({"": Job({"": run}, step.prepare)}, rounds=rounds, warm_up_rounds=warm_up_rounds)
    finally:
        for handle in handles:
            handle.remove()
    latest_s = torch.tensor(of_all_ranks(marks_s[warm_up_rounds:]), dtype=torch.float64).amax(dim=0)
    began_s, ended_s = latest_s[:, :1], latest_s[:, -1:]
    fractions = ((latest_s[:, 1:-1] - began_s) / (ended_s - began_s)).quantile(0.5, dim=0).tolist()
    return sorted(zip(fractions, (parameter.nbytes for parameter in parameters), strict=True), key=lambda pair: pair[0])
