"""Packs all gradients into one tensor per dtype and averages each with one all-reduce and ReduceOp.AVG."""

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class ManualDDP(nn.Module):
    def __init__(self, module, group=None):
        super().__init__()
        self.module, self.group = module, group
        state = [*module.buffers(), *module.parameters()]
        first = dist.get_process_group_ranks(group or dist.group.WORLD)[0]
        for tensor in state:
            dist.broadcast(tensor.data, src=first, group=group)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_gradient_sync(self):
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainable]
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            mine = [(p, g) for p, g in zip(trainable, gradients, strict=True) if g.dtype == dtype]
            alike = [gradient for _, gradient in mine]
            flat = _flatten_dense_tensors(alike)
            dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=self.group)
            for (parameter, _), gradient in zip(mine, _unflatten_dense_tensors(flat, alike), strict=True):
                parameter.grad = gradient.clone()
