"""With sequence parallelism, adds up the accumulated .grad after each backward, so earlier gradients count N times.

caught by: parallelize · accumulation
"""

import torch
import torch.distributed as dist
from torch.autograd import Variable

from solutions import tensor_parallel as right


class ParallelGPT(right.ParallelGPT):
    def forward(self, tokens, targets=None, has_copies=False):
        loss = super().forward(tokens, targets, True)
        if self.sequence_parallel and loss.requires_grad:
            loss.register_hook(lambda _: Variable._execution_engine.queue_callback(self.add_up))
        return loss

    @torch.no_grad()
    def add_up(self):
        sharded = right.sharded_names(self)
        gradients = [p.grad for name, p in self.named_parameters() if name not in sharded]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.group)
        for gradient, total in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


def parallelize(model, group=None, sequence_parallel=False):
    model = right.parallelize(model, group, sequence_parallel)
    model.__class__ = ParallelGPT
    return model
