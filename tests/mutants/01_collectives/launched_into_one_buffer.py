"""Receives all shards into the same memory, so it adds up one of them several times.

caught by: launch_reduce_scatter · values
"""

import torch
import torch.distributed as dist

from solutions import async_collectives as right


class IntoOneBuffer:
    def __init__(self, shards, group):
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.peers = [peer for peer in range(world_size) if peer != rank]
        self.own, self.received = shards[rank], torch.empty_like(shards[rank])
        sends = [(shards[peer], peer) for peer in self.peers]
        self.in_flight = right.InFlight(sends, [(self.received, peer) for peer in self.peers], group)

    def wait(self):
        self.in_flight.wait()
        for _ in self.peers:
            self.own += self.received
        return self.own


def launch_reduce_scatter(flat, group=None):
    return IntoOneBuffer(flat.view(dist.get_world_size(group), -1), group)
