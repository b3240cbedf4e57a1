"""The stages of a pipeline: what a layer, a schedule, a batch or a step cannot be."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from shared.guards.alarms import as_a_wait
from shared.schedules import Action, check_schedule, micro_batches_of


def expect_tensor(output, layer: nn.Module) -> Tensor:
    """Return a layer's output. Raise a TypeError if it is not a tensor."""
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{type(layer).__name__} returns a {type(output).__name__}, but each layer of a pipeline "
            "must return one tensor: wrap it in a module that does"
        )
    return output


def expect_message(gradient: Tensor | None) -> None:
    """Raise a RuntimeError if a stage has no gradient for the previous one, whose parameters would then get zeros."""
    if gradient is None:
        raise RuntimeError(
            "the layers of this stage have returned an output that does not depend on their input, for example because "
            "they call detach(), so earlier stages would get no gradient: begin the pipeline behind these layers"
        )


def is_plain_linear(layer: nn.Linear, x: Tensor) -> bool:
    """Tell whether the gradient of a layer's weight is the product of two tensors, and nobody needs it early."""
    weight = layer.weight
    return (
        type(layer) is nn.Linear  # a parametrization changes the class
        and type(weight) is nn.Parameter  # old weight_norm and pruning leave a tensor that is not a leaf
        and weight.requires_grad
        and not weight._backward_hooks
        and not torch._C._is_any_autocast_enabled()
        and not torch.compiler.is_compiling()
        and x.dim() > 1
    )


def accumulate(weight: nn.Parameter, gradient: Tensor) -> None:
    """Add a gradient to weight.grad, and call the hooks that autograd would call then."""
    weight.grad = gradient if weight.grad is None else weight.grad + gradient
    if weight._post_accumulate_grad_hooks:
        for hook in weight._post_accumulate_grad_hooks.values():
            hook(weight)


def expect_schedule(schedule: Sequence[Sequence[Action]], stages: int, micro_batches: int) -> None:
    """Raise a ValueError if a schedule cannot work, or is for other numbers of stages and micro-batches."""
    check_schedule(schedule)
    for what, found, expected in (
        ("stages", len(schedule), stages),
        ("micro-batches", micro_batches_of(schedule), micro_batches),
    ):
        if found != expected:
            raise ValueError(f"the schedule is for {found} {what}, but there are {expected}")


def expect_equal_parts(inputs: Tensor, targets: Tensor, micro_batches: int) -> None:
    """Raise a ValueError if a batch cannot be cut into equal micro-batches."""
    for what, tensor in (("a batch of {} samples", inputs), ("{} targets", targets)):
        if len(tensor) % micro_batches:
            raise ValueError(f"{what.format(len(tensor))} cannot be cut into {micro_batches} equal micro-batches")


class Uninterrupted:
    """A with-block that cannot be entered again after an error in it."""

    is_running, group = False, None

    def __enter__(self):
        if self.is_running:
            raise RuntimeError(
                "an earlier step() ended with an error, and its messages may still be in flight: "
                "start new ranks, and build the Pipeline from a checkpoint"
            )
        self.is_running = True

    def __exit__(self, kind, error, _traceback):
        self.is_running = error is not None
        if isinstance(error, RuntimeError):
            advice = "let all stages call step() equally often, and look for an error of another stage"
            named = as_a_wait(error, self.group, "a message of another stage", advice)
            if named is not error:
                raise named
