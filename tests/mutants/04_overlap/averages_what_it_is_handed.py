"""Averages the argument of the post-accumulate hook, which is the parameter, not its gradient.

caught by: OverlappedDDP · values
"""

import torch.distributed as dist

from solutions import overlapped_ddp as right


class _Sync(right.GradientSync):
    def on_gradient(self, bucket_index, index):
        parameter = self.queue.buckets[bucket_index].parameters[index]
        parameter.data /= dist.get_world_size()
        dist.all_reduce(parameter.data)

    def finish(self):
        pass


class OverlappedDDP(right.OverlappedDDP):
    def __init__(self, module, bucket_cap_mb=25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.sync = _Sync(self.buckets)
