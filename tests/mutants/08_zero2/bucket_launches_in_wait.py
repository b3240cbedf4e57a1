"""Launches the reduce-scatter in wait() instead of launch().

caught by: ShardedBucket · wire
"""

from solutions import zero2 as right


class _Later:
    def __init__(self, flat, group):
        self.flat, self.group = flat, group

    def wait(self):
        return right.launch_reduce_scatter(self.flat, self.group).wait()


class ShardedBucket(right.ShardedBucket):
    def launch(self):
        if self.previous is not None:
            self.previous.wait()
        self.in_flight = _Later(self.flat, self.layout.group)
