"""A second wait() adds what has arrived once more.

caught by: TravellingGradients · values
"""

from solutions import zero2 as right


class TravellingGradients(right.TravellingGradients):
    arrived = None

    def wait(self):
        if self.finish is None and self.arrived is not None:
            self.home.shard.grad += self.arrived
        super().wait()
        self.arrived = self.home.shard.grad.clone()
