"""One broadcast per rank: N messages for one.

caught by: FlatParameters · gather
"""

import torch.distributed as dist

from solutions import zero1 as right


class FlatParameters(right.FlatParameters):
    def gather(self):
        parts = self.flat.detach().chunk(dist.get_world_size(self.group))
        for place, part in enumerate(parts):
            handle = dist.broadcast(part, group=self.group, group_src=place, async_op=True)
            handle.wait()
        return handle
