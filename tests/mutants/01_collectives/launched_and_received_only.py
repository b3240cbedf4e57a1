"""Waits for what is received, but not for what is sent, so the caller may overwrite it too early.

caught by: launch_reduce_scatter · all messages
"""

from solutions import async_collectives as right


class _Receiving(right.DirectReduceScatter):
    def wait(self):
        for work, shard in zip(self.in_flight.works, self.received, strict=False):
            work.wait()
            self.own += shard
        return self.own


def launch_reduce_scatter(flat, group=None):
    return _Receiving(flat.view(right.dist.get_world_size(group), -1), group)
