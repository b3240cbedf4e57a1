"""A training step as a job: forward, backward, and waiting for the gradients."""

import contextlib

from torch import nn

from shared.measure.rounds import Job


def training_step(model: nn.Module, *batch, sync: bool = True) -> Job:
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


def _communicating(model: nn.Module, sync: bool):
    return contextlib.nullcontext() if sync else model.no_sync()
