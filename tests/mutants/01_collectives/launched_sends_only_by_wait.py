"""Launches its receives at once, but its sends only in `wait()`.

caught by: launch_reduce_scatter · at once
"""

import torch.distributed as dist

from solutions.async_collectives import InFlight


class _SendsLate:
    def __init__(self, shards, group):
        rank, self.group = dist.get_rank(group), group
        peers = [peer for peer in range(dist.get_world_size(group)) if peer != rank]
        self.own, self.sends = shards[rank], [(shards[peer], peer) for peer in peers]
        self.received = self.own.new_empty(len(peers), self.own.numel())
        self.receiving = InFlight([], list(zip(self.received, peers, strict=True)), group)

    def wait(self):
        sending = InFlight(self.sends, [], self.group)
        self.receiving.wait()
        sending.wait()
        for shard in self.received:
            self.own += shard
        return self.own


def launch_reduce_scatter(flat, group=None):
    return _SendsLate(flat.view(dist.get_world_size(group), -1), group)
