"""Check that gradients that are part of a graph are rejected, because a collective cannot be differentiated."""

import torch
from torch import nn

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.failures import Wrong
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
                "Hint: can autograd differentiate through an all-reduce?",
            )


def probe_waits(bucket_class) -> list[str]:
    """Wait before the first launch, and once more after each of two steps. Returns the types of the errors."""
    parameter = nn.Parameter(torch.ones(4, dtype=torch.float64, device=device_here()))
    bucket = bucket_class([parameter])
    errors = [_error_of_wait(bucket)]
    for _ in range(2):
        parameter.grad = torch.ones_like(parameter)
        bucket.pack(0)
        bucket.launch()
        bucket.wait()
        errors.append(_error_of_wait(bucket))
    return errors


def _error_of_wait(bucket) -> str:
    try:
        bucket.wait()
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    return ""


def bucket_rejects_a_wait_for_nothing(attempt: Attempt) -> None:
    moments = ("before the first launch()", "after the wait() of step 1", "after the wait() of step 2")
    for rank, errors in enumerate(attempt.run(probe_waits)):
        for moment, error in zip(moments, errors, strict=True):
            if error == "RuntimeError":
                continue
            message = f"raised {error}" if error else "raised no error"
            hint = "Hint: how does the bucket know whether an all-reduce is in flight, and when does that change?"
            raise Wrong({rank: f"{moment}, wait() {message}; expected a RuntimeError"}, hint)


def bucket_rejects_graphs(attempt: Attempt) -> None:
    for rank, error in enumerate(attempt.run(probe_differentiable)):
        if error != "RuntimeError":
            message = f"pack() raised {error}" if error else "pack() raised no error"
            hint = "Hint: can autograd differentiate through an all-reduce?"
            raise Wrong({rank: f"for a gradient that is part of a graph, {message}; expected a RuntimeError"}, hint)
