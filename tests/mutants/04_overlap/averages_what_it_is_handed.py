"""Averages what a post-accumulate hook receives: the parameter, not its gradient.

caught by: OverlappedDDP · values
"""

import torch.distributed as dist

from solutions import overlapped_ddp as right


class OverlappedDDP(right.OverlappedDDP):
    def _on_gradient(self, parameter):
        parameter.data /= dist.get_world_size()
        dist.all_reduce(parameter.data)

    def finish_gradient_sync(self):
        pass
