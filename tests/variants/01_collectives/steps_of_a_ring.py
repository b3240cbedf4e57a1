"""Writes each step of a ring as a list of calls that are made in turn or in one batch."""

import torch
import torch.distributed as dist

from solutions.collectives import (  # noqa: F401
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    tree_broadcast,
)


def _transfers(outgoing, incoming, group):
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return ("send", outgoing, (rank + 1) % size), ("recv", incoming, (rank - 1) % size)


def ring_step(outgoing, incoming, group=None):
    operations = [
        dist.P2POp(getattr(dist, f"i{name}"), tensor, group=group, group_peer=peer)
        for name, tensor, peer in reversed(_transfers(outgoing, incoming, group))
    ]
    for work in dist.batch_isend_irecv(operations):
        assert work.wait() is not False


def ring_step_in_turns(outgoing, incoming, group=None):
    send, recv = _transfers(outgoing, incoming, group)
    partner = {"send": "group_dst", "recv": "group_src"}
    for name, tensor, peer in (recv, send) if dist.get_rank(group) % 2 == 0 else (send, recv):
        getattr(dist, name)(tensor, group=group, **{partner[name]: peer})


@torch.no_grad()
def direct_reduce_scatter(tensor, group=None):
    """Pad each chunk by itself, and read the total from cumulative sums."""
    size = dist.get_world_size(group)
    numel = -(-tensor.numel() // size)
    outgoing = tensor.new_zeros(size, numel)
    for row, chunk in zip(outgoing, tensor.reshape(-1).split(max(1, numel)), strict=False):
        row[: chunk.numel()] = chunk
    incoming = torch.zeros_like(outgoing)
    dist.all_to_all_single(incoming, outgoing, group=group)
    return incoming.cumsum(0, dtype=tensor.dtype)[-1].clone()
