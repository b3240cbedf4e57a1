"""A gradient that is part of a graph cannot be averaged by a message: a bucket, or a wrapper, must say so."""

import torch
from torch import nn

from shared.checks.engine.candidate import device_here
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.training import Draw
from shared.checks.models import awkward


def probe_differentiable(bucket_class) -> str:
    """Pack a gradient that is part of a graph. → the kind of error that says so, "" for none"""
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
    """Run backward(create_graph=True) under a wrapper. → the kind of error that refuses it, "" for none"""
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


def judge_refusal(attempt: Attempt, options: dict) -> None:
    """Raises: Wrong unless a wrapper answers create_graph=True with a RuntimeError."""
    for rank, error in enumerate(attempt.run(probe_refusal, options, per_rank=Draw(attempt).per_rank)):
        if error != "RuntimeError":
            message = f"{error} came" if error else "no error came"
            raise Wrong(
                {rank: f"after backward(create_graph=True), {message}; expected a RuntimeError that says why"},
                "Hint: what does a gradient that is itself differentiable lose on the way through a message?",
            )


def bucket_refuses_graphs(attempt: Attempt) -> None:
    for rank, error in enumerate(attempt.run(probe_differentiable)):
        if error != "RuntimeError":
            message = f"it raised {error}" if error else "it was packed without a word"
            hint = "Hint: what does such a gradient lose on the way through a message?"
            raise Wrong({rank: f"a gradient that is part of a graph: {message}; expected a RuntimeError"}, hint)
