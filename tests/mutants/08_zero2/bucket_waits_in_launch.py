"""Waits in launch() for the collective that it has just launched.

caught by: ShardedBucket · at once
"""

from solutions import zero2 as right


class _Complete:
    def __init__(self, shard):
        self.shard = shard

    def wait(self):
        return self.shard


class ShardedBucket(right.ShardedBucket):
    def launch(self):
        super().launch()
        self.in_flight = _Complete(self.in_flight.wait())
