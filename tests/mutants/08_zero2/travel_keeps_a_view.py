"""shard.grad is a view of the flat tensor, all of which it keeps alive.

caught by: TravellingGradients · memory
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    def wait(self):
        if self.finish is None or self.home.shard.grad is not None:
            return super().wait()
        own = self.home.own(self.flat)
        super().wait()
        self.home.shard.grad = own.copy_(self.home.shard.grad)
