"""Call a first collective on a rank: what it gave back, what it sent, and what became of its argument."""

import time

import torch
import torch.distributed as dist

from shared.checks.engine.candidate import device_here
from shared.deadlines import scaled
from shared.wire import instrumentation

LATE_S = scaled(0.2)  # how late one rank comes where waiting is checked


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device_here(), copy=True)


def probe_numbers(function, *values) -> dict:
    """Call function with each value in turn. → what each call gave back, and its messages"""
    results, calls = [], []
    for value in values:
        with instrumentation.listening() as heard:
            results.append(_described(function(value)))
        calls.append(heard)
    return {"results": results, "calls": calls}


def _described(result) -> tuple[str, object]:
    """→ the type's name, and the value as the kernel may have it"""
    value = result.detach().cpu() if isinstance(result, torch.Tensor) else result
    return type(result).__name__, value if isinstance(value, (torch.Tensor, float, int)) else None


def probe_mean(global_mean, values: torch.Tensor) -> dict:
    argument = _on_device(values)
    found = probe_numbers(global_mean, argument)
    return {**found, "argument": argument.cpu()}


def probe_pass(pass_right, late_rank: int | None, mine: torch.Tensor) -> dict:
    """Pass one tensor on. One rank may come late; the argument is overwritten as soon as the call returns."""
    argument = _on_device(mine)
    dist.barrier()
    if dist.get_rank() == late_rank:
        time.sleep(LATE_S)
    with instrumentation.listening() as calls:
        result = pass_right(argument)
    result = result.clone() if isinstance(result, torch.Tensor) else result
    kept = argument.cpu().clone()
    argument.fill_(-1)
    dist.barrier()  # nobody leaves, and frees its tensors, while a message may still be under way
    return {"result": _described(result), "argument": kept, "calls": calls}


def probe_loss(log_mean_loss, value: float) -> dict:
    """Log the loss of a model with one weight, then do with the loss what a training step does."""
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
