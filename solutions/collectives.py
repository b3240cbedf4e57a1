# Built by `make notebooks` from source/01_collectives/lab.py: edit that, not this.
"""Collectives by hand: reduce-scatter, all-gather and all-reduce around a ring, broadcast along a tree.

On a group of N ranks, a tensor is cut into N chunks of ceil(numel / N) elements, and chunk r belongs to rank r. If N
does not divide numel, the last chunks are shorter, or empty. As in torch.distributed, autograd records none of these
functions.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from shared.c10d import all_gather_single


def ring_step(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None) -> None:
    """Send outgoing to the right neighbor, and receive the left neighbor's outgoing into incoming.

    Communication: one transfer of outgoing's bytes.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    # One batch, because NCCL must launch both together. The receive comes first, so that gloo knows its destination.
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=left)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    for handle in dist.batch_isend_irecv([receive, send]):
        handle.wait()


def chunks_of(tensor: Tensor, world_size: int) -> list[Tensor]:
    """Cut a contiguous tensor into world_size flat views, of which the last ones may be shorter, or empty.

    Raises:
        ValueError: if tensor is not contiguous, because it has no flat view then.

    Shape: returns world_size tensors of at most ceil(numel / world_size) elements.
    """
    if not tensor.is_contiguous():
        raise ValueError("chunks are views, so the tensor must be contiguous: call .contiguous() first")
    flat, chunk_numel = tensor.view(-1), -(-tensor.numel() // world_size)  # rounded up
    return [flat[index * chunk_numel : (index + 1) * chunk_numel] for index in range(world_size)]


@torch.no_grad()
def ring_reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Sum tensor over the group's N ranks, and return chunk r of the sum, padded with zeros, on rank r.

    The sum is rounded to tensor's dtype at every step. The result never shares memory with tensor, not even if N = 1.

    Shape: tensor of any shape; returns [ceil(numel / N)].
    Communication: N − 1 transfers, at most (N−1)·ceil(numel / N) elements sent per rank.
    Source: nccl-tests, PERFORMANCE.md.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = chunks_of(tensor.contiguous(), world_size)
    partial_sum = chunks[(rank - 1) % world_size]
    for step in range(1, world_size):
        addend = chunks[(rank - step - 1) % world_size]
        received = torch.empty_like(addend)
        ring_step(partial_sum, received, group)
        partial_sum = received.add_(addend)
    padding = chunks[0].numel() - partial_sum.numel()
    if padding or world_size == 1:  # a single rank must not return a view of tensor: pad() copies
        partial_sum = pad(partial_sum, (0, padding))
    return partial_sum


def gather_around(chunks: list[Tensor], group: ProcessGroup | None = None) -> None:
    """Fill chunks on every rank. chunks[r] starts at rank r and visits every other rank once."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(world_size - 1):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        ring_step(chunks[outgoing], chunks[incoming], group)


@torch.no_grad()
def ring_all_gather(shard: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Concatenate the shards of the group's N ranks, in rank order, on every rank.

    Shape: shard [n], the same n on every rank; returns [N · n].
    Communication: N − 1 transfers of shard's bytes.
    Source: nccl-tests, PERFORMANCE.md.
    """
    gathered = shard.new_empty(dist.get_world_size(group), shard.numel())
    gathered[dist.get_rank(group)] = shard.flatten()
    gather_around(list(gathered), group)
    return gathered.view(-1)


@torch.no_grad()
def ring_all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Replace tensor, in place, by its sum over the group's N ranks. The results are bitwise equal on all ranks.

    Communication: 2(N−1) transfers, at most 2(N−1)·ceil(numel / N) elements sent per rank.
    Source: nccl-tests, PERFORMANCE.md.
    """
    contiguous = tensor.contiguous()
    chunks = chunks_of(contiguous, dist.get_world_size(group))
    own_chunk = chunks[dist.get_rank(group)]
    own_chunk.copy_(ring_reduce_scatter(contiguous, group)[: own_chunk.numel()])
    gather_around(chunks, group)
    if contiguous is not tensor:
        tensor.copy_(contiguous)


@torch.no_grad()
def tree_broadcast(tensor: Tensor, src: int = 0, group: ProcessGroup | None = None) -> None:
    """Replace tensor, in place, by that of global rank src. The number of copies doubles in each round.

    Communication: ceil(log2 N) rounds; N − 1 transfers of tensor's bytes over all ranks, at most one to each.
    """
    group = dist.group.WORLD if group is None else group
    world_size, root = dist.get_world_size(group), dist.get_group_rank(group, src)
    index = (dist.get_rank(group) - root) % world_size  # src has index 0

    def rank_of(index: int) -> int:
        return (index + root) % world_size

    contiguous = tensor.contiguous()
    holders = 1  # how many ranks have the tensor: those with the smallest indices
    while holders < world_size:
        if index < holders and index + holders < world_size:
            dist.send(contiguous, group=group, group_dst=rank_of(index + holders))
        elif holders <= index < 2 * holders:
            dist.recv(contiguous, group=group, group_src=rank_of(index - holders))
        holders *= 2
    if contiguous is not tensor:
        tensor.copy_(contiguous)


def ring_step_in_turns(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None) -> None:
    """Do what ring_step does with send and recv alone, each of which waits for the other side.

    Communication: one transfer of outgoing's bytes; 2 turns for an even number of ranks, 3 for an odd one.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    if rank % 2 == 0:
        dist.send(outgoing, group=group, group_dst=right)
    dist.recv(incoming, group=group, group_src=left)
    if rank % 2 == 1:
        dist.send(outgoing, group=group, group_dst=right)


@torch.no_grad()
def direct_reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Do what ring_reduce_scatter does, but send each chunk directly to its owner.

    Shape: tensor of any shape; returns [ceil(numel / N)].
    Communication: one all_to_all_single of the padded tensor; (N−1)·ceil(numel / N) elements sent per rank.
    """
    world_size = dist.get_world_size(group)
    flat, padding = tensor.contiguous().view(-1), -tensor.numel() % world_size
    padded = pad(flat, (0, padding)) if padding else flat
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    return received.view(world_size, padded.numel() // world_size).sum(0, dtype=tensor.dtype)


def gather_shards(shard: Tensor, group: ProcessGroup | None = None, dst: int | None = None) -> Tensor | None:
    """Concatenate the shards of all ranks, in rank order, on group rank dst, or on every rank if dst is None.

    Returns:
        The flat tensor, or None on ranks that do not get it.

    Shape: shard [n]; returns [N · n].
    Communication: one gather, or one all-gather if dst is None.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if dst not in (None, rank):
        dist.gather(shard, group=group, group_dst=dst)
        return None
    flat = shard.new_empty(world_size * shard.numel())
    if dst is None:
        all_gather_single(flat, shard, group=group)
    else:
        dist.gather(shard, list(flat.chunk(world_size)), group=group, group_dst=dst)
    return flat
