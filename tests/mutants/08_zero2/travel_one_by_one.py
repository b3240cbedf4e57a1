"""Sends every gradient in a message of its own.

caught by: TravellingGradients · wire
"""

import torch

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def launch(self):
        if self.before is not None:
            self.before.wait()
        group, size = self.home.group, right.dist.get_world_size(self.home.group)
        columns = self.flat.view(size, -1).split(5, dim=1)
        parts = [right.begin_reduce_scatter(each.flatten(), group) for each in columns]
        self.finish = lambda: torch.cat([finish() for finish in parts])
