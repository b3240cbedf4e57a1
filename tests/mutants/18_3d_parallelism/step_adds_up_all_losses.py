"""Returns the sum of all ranks' losses.

caught by: Parallel3D · plain replicas
"""

import torch.distributed as dist

from solutions import parallel_3d as right


class Parallel3D(right.Parallel3D):
    def step(self, inputs, targets):
        own = self.own_part(inputs), self.own_part(targets)
        if self.zero_stage == 0:
            with self.replica.no_sync():
                loss = self.pipeline.step(*own)
            self.replica.finish_gradient_sync()
        else:
            loss = self.pipeline.step(*own)
        dist.all_reduce(loss)
        return loss
