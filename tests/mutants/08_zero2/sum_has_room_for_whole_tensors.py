"""Receives parts into tensors as long as flat: the bytes sent are right.

caught by: begin_reduce_scatter · memory
"""

import torch
import torch.distributed as dist

from solutions.zero1 import Messages


def begin_reduce_scatter(flat, group=None):
    rank, parts = dist.get_rank(group), flat.view(dist.get_world_size(group), -1)
    others = [peer for peer in range(len(parts)) if peer != rank]
    arrived = {peer: torch.empty_like(flat).view(len(parts), -1)[rank] for peer in others}
    messages = Messages([(parts[peer], peer) for peer in others], [(arrived[peer], peer) for peer in others], group)

    def finish():
        messages.wait()
        return sum(arrived.values(), start=parts[rank].clone())

    return finish
