"""Takes the index of a stage for a rank of the world.

caught by: Neighbors · group
"""

import torch.distributed as dist

from solutions import neighbors as right


class Neighbors(right.Neighbors):
    def send(self, kind, tensor):
        if self.stages == 1:
            return super().send(kind, tensor)
        message = tensor.contiguous()
        work = dist.isend(message, self.route(kind)[1], tag=right.TAGS[kind])
        self.in_flight[kind].append((work, message))
