"""Check that gradients that are part of a graph are rejected, because a collective cannot be differentiated."""

import torch
from torch import nn

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.training import Draw
from shared.checks.models import awkward


def probe_differentiable(bucket_class) -> str:
    """Pack a gradient that is part of a graph. Returns the type of the error, or "" for none."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float64, device=device_here()))
    bucket = bucket_class([parameter])
    (parameter**3).sum().backward(create_graph=True)
    try:
        bucket.pack(0)
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    finally:
        parameter.grad = None  # it refers to its own graph
    return ""


def probe_refusal(wrapper, options: dict, seed: int, x, y) -> str:
    """Run backward(create_graph=True) in a wrapper. Returns the type of the error, or "" for none."""
    module = awkward.build("Plain", seed).to(device_here())
    wrapped = wrapper(module, **options)
    try:
        awkward.loss_of(wrapped, x.to(device_here()), y.to(device_here())).backward(create_graph=True)
        wrapped.finish_gradient_sync()
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    finally:
        module.zero_grad()  # such a gradient refers to its own graph
    return ""


def judge_rejection(attempt: Attempt, options: dict) -> None:
    """Check that a wrapper rejects create_graph=True with a RuntimeError.

    Raises:
        Wrong: If it does not.
    """
    for rank, error in enumerate(attempt.run(probe_refusal, options, per_rank=Draw(attempt).per_rank)):
        if error != "RuntimeError":
            message = f"{error} was raised" if error else "no error was raised"
            raise Wrong(
                {rank: f"after backward(create_graph=True), {message}; expected a RuntimeError that says why"},
                "Hint: what does a differentiable gradient lose when it is sent?",
            )


def bucket_rejects_graphs(attempt: Attempt) -> None:
    for rank, error in enumerate(attempt.run(probe_differentiable)):
        if error != "RuntimeError":
            message = f"pack() raised {error}" if error else "pack() raised no error"
            hint = "Hint: what does a differentiable gradient lose when it is sent?"
            raise Wrong({rank: f"for a gradient that is part of a graph, {message}; expected a RuntimeError"}, hint)
