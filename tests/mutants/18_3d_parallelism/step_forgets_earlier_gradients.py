"""Sets the gradients to zero, although the caller may add up those of several batches.

caught by: Parallel3D · awkward models
"""

import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        own = self.own_part(inputs), self.own_part(targets)
        if self.zero_stage == 0:
            with self.replica.no_sync():
                loss = self.pipeline.step(*own)
            self.replica.finish_gradient_sync()
        else:
            loss = self.pipeline.step(*own)
        dist.all_reduce(loss, group=self.dp_group)
        return loss / self.replicas
