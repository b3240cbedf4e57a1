# Built by `make notebooks` from source/03_gradient_bucketing/lab.py: edit that, not this.
"""Data parallelism with gradient buckets: the same bytes in fewer messages."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from solutions.manual_ddp import broadcast_state

MB = 2**20  # bytes, as torch's DDP counts its bucket_cap_mb


def flat_and_slices(parameters: list[nn.Parameter]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate one flat tensor for the gradients of parameters, which share a dtype and a device.

    Shapes: → flat [sum of numel()], and per parameter a view of flat with the parameter's shape
    """
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    pieces = flat.split(sizes)
    return flat, [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]


def assign_buckets(
    parameters: Iterable[nn.Parameter], bucket_cap_mb: float = 25.0, first_bucket_mb: float = 1.0
) -> list[list[nn.Parameter]]:
    """Split trainable parameters into buckets, in the order in which backward() completes their gradients.

    Units: caps in MB of 2²⁰ bytes. The first bucket of each dtype is smaller, so that it can leave early.
    Source: torch's DDP with its default cap has the same order and caps, but closes a bucket once it is at or over
    its cap.
    """
    buckets = []
    filling = {}  # per dtype and device: the open bucket, and how many bytes it has room for
    for parameter in reversed(list(parameters)):
        if not parameter.requires_grad:
            continue
        kind = (parameter.dtype, parameter.device)
        bucket, room_bytes = filling.get(kind, (None, 0))
        if bucket is None or parameter.nbytes > room_bytes:
            cap_mb = bucket_cap_mb if kind in filling else min(first_bucket_mb, bucket_cap_mb)
            bucket, room_bytes = [], cap_mb * MB
            buckets.append(bucket)
        bucket.append(parameter)
        filling[kind] = bucket, room_bytes - parameter.nbytes
    return buckets


class Bucket:
    """The gradients of its `parameters`, which travel in one message: slices of one flat tensor.

    Once packed, a parameter's .grad *is* its slice: what arrives need not be copied back, and no second copy is held.
    Comm: launch() is one all_reduce of the flat tensor.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        self.parameters, self.group = parameters, group
        self.flat, self.slices = flat_and_slices(parameters)
        # torch.div would make a tensor of a number in every call
        self.divisor = torch.tensor(float(dist.get_world_size(group)))
        self.handle = None

    def pack(self, place: int) -> None:
        """Bring the gradient of parameters[place] home, divided by the number of ranks; None counts as zeros.

        Raises: RuntimeError for a gradient that is itself differentiable.
        """
        parameter, piece = self.parameters[place], self.slices[place]
        if parameter.grad is None:
            piece.zero_()
        elif parameter.grad.requires_grad:
            raise RuntimeError("create_graph=True: messages have no graph; use the module itself")
        else:
            torch.div(parameter.grad, self.divisor, out=piece)
        parameter.grad = piece

    def launch(self) -> None:
        """Begin to add the flat tensor up over the group."""
        self.handle = dist.all_reduce(self.flat, group=self.group, async_op=True)

    def wait(self) -> None:
        """Wait until what launch() began is done. Raises: RuntimeError where nothing is under way."""
        if self.handle is None:
            raise RuntimeError("nothing is under way: launch() comes before wait()")
        self.handle.wait()
        self.handle = None


class BucketedDDP(nn.Module):
    """Train a replica of module on each rank of the group, with gradients averaged bucket by bucket.

    Call finish_gradient_sync() after backward() and before the optimizer's step. `.module` is the module itself.

    Comm: when built, one broadcast per parameter and buffer; per step, one all_reduce per bucket.
    Raises: RuntimeError, at the latest in finish_gradient_sync(), for backward(create_graph=True).
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
        """Average what backward() has accumulated since zero_grad()."""
        for bucket in self.buckets:
            for place in range(len(bucket.parameters)):
                bucket.pack(place)
            bucket.launch()
        for bucket in self.buckets:
            bucket.wait()
