"""Call one of the first collectives on a rank, and record its result, its messages and its argument afterwards."""

import time

import torch
import torch.distributed as dist

from shared.checks.engine.candidate import device_here
from shared.deadlines import scaled
from shared.wire import instrumentation

LATE_S = scaled(0.2)  # how late one rank is in the checks named "waits"


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device_here(), copy=True)


def probe_numbers(function, *values) -> dict:
    """Call a function with each value in turn. Returns the result of each call and its messages."""
    results, calls = [], []
    for value in values:
        with instrumentation.listening() as calls_of_value:
            results.append(_described(function(value)))
        calls.append(calls_of_value)
    return {"results": results, "calls": calls}


def _described(result) -> tuple[str, object]:
    """Return the name of the result's type, and its value if it is a tensor or a number."""
    value = result.detach().cpu() if isinstance(result, torch.Tensor) else result
    return type(result).__name__, value if isinstance(value, (torch.Tensor, float, int)) else None


def probe_mean(global_mean, values: torch.Tensor) -> dict:
    argument = _on_device(values)
    found = probe_numbers(global_mean, argument)
    return {**found, "argument": argument.cpu()}


def probe_pass(pass_right, late_rank: int | None, mine: torch.Tensor) -> dict:
    """Pass one tensor to the right. One rank may be late. The argument is overwritten as soon as the call returns."""
    argument = _on_device(mine)
    dist.barrier()
    if dist.get_rank() == late_rank:
        time.sleep(LATE_S)
    with instrumentation.listening() as calls:
        result = pass_right(argument)
    result = result.clone() if isinstance(result, torch.Tensor) else result
    kept = argument.cpu().clone()
    argument.fill_(-1)
    dist.barrier()  # no rank may free its tensors while a message is still in flight
    return {"result": _described(result), "argument": kept, "calls": calls}


def probe_loss(log_mean_loss, value: float) -> dict:
    """Log the loss of a model with one weight, and then call backward() on it, as a training step does."""
    weight = _on_device(torch.tensor(value)).requires_grad_()
    loss = weight * 1.0
    with instrumentation.listening() as calls:
        result = log_mean_loss(loss)
    kept = loss.item()
    loss.backward()
    return {"result": _described(result), "loss": kept, "gradient": weight.grad.item(), "calls": calls}


def probe_broadcast(broadcast_by_hand, src: int, mine: torch.Tensor) -> dict:
    argument = _on_device(mine)
    with instrumentation.listening() as calls:
        broadcast_by_hand(argument, src)
    return {"tensor": argument.cpu(), "calls": calls}
