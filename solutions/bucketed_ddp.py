# Built by `make notebooks` from source/03_gradient_bucketing/lab.py: edit that, not this.
"""Data parallelism with gradient buckets: the same bytes in fewer collectives."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from shared import guards
from solutions.manual_ddp import broadcast_state

MB = 2**20  # bytes, as in the bucket_cap_mb of torch's DDP


def flat_and_slices(parameters: list[nn.Parameter]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate one flat tensor for the gradients of parameters that share a dtype and a device.

    Returns:
        The flat tensor, with one element per element of the parameters, and its slices: for each parameter, a view
        with the parameter's shape.
    """
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    slices = [s.view(p.shape) for s, p in zip(flat.split(sizes), parameters, strict=True)]
    return flat, slices


def assign_buckets(
    parameters: Iterable[nn.Parameter], bucket_cap_mb: float = 25.0, first_bucket_mb: float = 1.0
) -> list[list[nn.Parameter]]:
    """Split trainable parameters into buckets, from the last parameter to the first.

    Args:
        parameters: The parameters of a module, in its order.
        bucket_cap_mb: The most MB (2²⁰ bytes) that a bucket holds. A larger parameter is alone in its bucket.
        first_bucket_mb: The cap of the first bucket of each dtype and device. It is smaller, so that the first
            collective can be launched early.

    Source: torch's DDP, with its default cap, uses the same caps, but it closes a bucket once the bucket has reached
        or exceeded its cap. From step 2 on, it follows the order in which backward() completed the gradients.
    """
    buckets = []
    open_buckets = {}  # by dtype and device: the open bucket, and how many bytes still fit into it
    for parameter in reversed(list(parameters)):
        if not parameter.requires_grad:
            continue
        key = (parameter.dtype, parameter.device)
        bucket, room_bytes = open_buckets.get(key, (None, 0))
        if bucket is None or parameter.nbytes > room_bytes:
            cap_mb = bucket_cap_mb if bucket else min(first_bucket_mb, bucket_cap_mb)
            bucket, room_bytes = [], cap_mb * MB
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[key] = bucket, room_bytes - parameter.nbytes
    return buckets


def reject_graph(gradient: torch.Tensor | None) -> None:
    """Raise a RuntimeError if a gradient is part of an autograd graph, because an all-reduce is not."""
    if gradient is not None and gradient.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True) is not supported, because an all-reduce is not part of "
            "the autograd graph: call the module itself instead of its wrapper"
        )


class Bucket:
    """Averages the gradients of its `parameters` with one all-reduce of a flat tensor.

    Once a parameter is packed, its .grad *is* a slice of the flat tensor, so nothing has to be copied back.

    Communication: launch() starts one all-reduce of the flat tensor.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        self.parameters, self.group = parameters, group
        self.flat, self.slices = flat_and_slices(parameters)
        # The divisor is a tensor, because torch.div would convert a number to a tensor in every call.
        self.divisor = torch.tensor(float(dist.get_world_size(group)))
        self.handle = None

    def pack(self, index: int) -> None:
        """Copy the gradient of parameters[index], or zeros for None, into its slice, divided by the number of ranks."""
        parameter = self.parameters[index]
        reject_graph(parameter.grad)
        grad_slice = self.slices[index]
        if parameter.grad is None:
            grad_slice.fill_(guards.UNUSED)  # [Note: negative zeros]
        else:
            torch.div(parameter.grad, self.divisor, out=grad_slice)
        parameter.grad = grad_slice

    def launch(self) -> None:
        """Start the all-reduce of the flat tensor, and return at once."""
        self.handle = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait until the all-reduce is complete. Raises RuntimeError if none is in flight."""
        if self.handle is None:
            raise RuntimeError("no all-reduce is in flight: call launch() before wait()")
        self.handle.wait()
        self.handle = None


@guards.guarded(guards.PerBucket)
class BucketedDDP(nn.Module):
    """Trains a replica of a module on each rank of the group, and averages the gradients bucket by bucket.

    Call finish_gradient_sync() right after backward(), before you clip gradients and before the step. The wrapped
    module is available as `.module`. If no rank has used a parameter, its gradient is zeros, or None if you send −0.0
    for None (exercise 2.3).

    Communication: one broadcast per parameter and buffer when built, and one all-reduce per bucket in each step.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0, group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        broadcast_state(module, group)
        assigned = assign_buckets(module.parameters(), bucket_cap_mb)
        self.buckets = [Bucket(parameters, group) for parameters in assigned]

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Average the gradients that backward() has accumulated since zero_grad().

        Raises:
            RuntimeError: After backward(create_graph=True).
        """
        for bucket in self.buckets:
            for index in range(len(bucket.parameters)):
                bucket.pack(index)
            bucket.launch()
        for bucket in self.buckets:
            bucket.wait()
