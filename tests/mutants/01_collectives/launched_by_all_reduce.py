"""All-reduces the whole tensor and returns the rank's shard of it: twice the bytes.

caught by: launch_reduce_scatter · wire
"""

import torch.distributed as dist


class _AllReduce:
    def __init__(self, flat, group):
        self.own = flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
        self.work = dist.all_reduce(flat, group=group, async_op=True)

    def wait(self):
        self.work.wait()
        return self.own.clone()


def launch_reduce_scatter(flat, group=None):
    return _AllReduce(flat, group)
