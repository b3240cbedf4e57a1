"""Adds the sum to what is there, and divides both.

caught by: TravellingGradients · values
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def wait(self):
        before = self.home.shard.grad
        if self.finish is not None and before is not None:
            self.home.shard.grad = before / right.dist.get_world_size(self.home.group)
        super().wait()
