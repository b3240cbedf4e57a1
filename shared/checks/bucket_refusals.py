"""A gradient that is part of a graph cannot be averaged by a message: a wrapper must say so."""

from shared.checks import awkward
from shared.checks.candidate import device_here
from shared.checks.framework import Attempt, Wrong
from shared.checks.training import Draw


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
            said = f"{error} came" if error else "no error came"
            raise Wrong(
                {rank: f"after backward(create_graph=True), {said}; expected a RuntimeError that says why"},
                "Look at: what does a gradient that is itself differentiable lose on the way through a message?",
            )
