"""Keeps no memory between steps: concatenates each bucket again, and its slices become the gradients.

A bucket is not concatenated if its gradients still are the slices of one tensor.
"""

from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


def _common_base(gradients):
    """Return the flat tensor of which the gradients are the slices, or None."""
    base, elements = gradients[0]._base, sum(gradient.numel() for gradient in gradients)
    if base is None or base.shape != (elements,) or any(gradient._base is not base for gradient in gradients):
        return None
    return base


class BucketedDDP(nn.Module):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__()
        self.module, self.group = module, group
        self.cap_bytes, self.first_bytes = bucket_cap_mb * 1024**2, min(bucket_cap_mb, 1) * 1024**2
        with torch.no_grad():
            for tensor in [*module.buffers(), *module.parameters()]:
                dist.broadcast(tensor, group=group, group_src=0)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def _with_bucket_indices(self):
        """Yield each trainable parameter with the index of its bucket: (bucket index, parameter)."""
        opened, last, left = 0, {}, {}
        for parameter in [p for p in self.module.parameters() if p.requires_grad][::-1]:
            if parameter.dtype not in left:
                left[parameter.dtype], last[parameter.dtype], opened = self.first_bytes, opened, opened + 1
                is_empty = True
            else:
                is_empty = False
            if parameter.nbytes > left[parameter.dtype] and not is_empty:
                left[parameter.dtype], last[parameter.dtype], opened = self.cap_bytes, opened, opened + 1
            left[parameter.dtype] -= parameter.nbytes
            yield last[parameter.dtype], parameter

    def finish_gradient_sync(self):
        in_flight = []
        for _, members in groupby(
            sorted(self._with_bucket_indices(), key=lambda each: each[0]), key=lambda each: each[0]
        ):
            parameters = [parameter for _, parameter in members]
            gradients = [p.new_zeros(p.shape) if p.grad is None else p.grad.contiguous() for p in parameters]
            if any(gradient.requires_grad for gradient in gradients):
                raise RuntimeError("a gradient that is part of a graph cannot be averaged")
            flat = _common_base(gradients)
            flat = _flatten_dense_tensors(gradients) if flat is None else flat
            handle = dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group, async_op=True)
            in_flight.append((handle, parameters, gradients, flat))
        while in_flight:
            handle, parameters, gradients, flat = in_flight.pop()
            handle.wait()
            for parameter, gradient in zip(parameters, _unflatten_dense_tensors(flat, gradients), strict=True):
                parameter.grad = gradient
