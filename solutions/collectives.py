# Built by `make notebooks` from source/01_collectives/lab.py: edit that, not this.
"""Collectives by hand: reduce-scatter, all-gather and all-reduce around a ring, broadcast along a tree.

N ranks; a tensor is cut into N chunks of ceil(numel / N) elements, chunk r for rank r. Where N does not divide
numel, the last chunks are shorter, or empty. Like torch's collectives, none of these records a gradient.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad


def ring_step(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None) -> None:
    """Send outgoing to the right neighbour while the left one's fills incoming.

    Comm: one message of outgoing's bytes.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    # One batch: NCCL must launch both together. The receive first: gloo then knows where to put what comes.
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=left)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    for handle in dist.batch_isend_irecv([receive, send]):
        handle.wait()


def chunks_of(tensor: Tensor, world_size: int) -> list[Tensor]:
    """Cut a contiguous tensor into world_size flat views; the last ones are shorter, or empty.

    Shapes: → world_size × [at most ceil(numel / world_size)]
    Raises: ValueError when tensor is not contiguous: no view can be flat then.
    """
    if not tensor.is_contiguous():
        raise ValueError("chunks are views, so the tensor must be contiguous")
    flat, size = tensor.view(-1), -(-tensor.numel() // world_size)
    return [flat[index * size : (index + 1) * size] for index in range(world_size)]


@torch.no_grad()
def ring_reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Add up tensor over the group's N ranks; rank r gets chunk r of the sum, filled up with zeros.

    Sums are rounded to tensor's dtype at every step. The result is new memory, for N = 1 too.

    Shapes: tensor: any → [ceil(numel / N)]
    Comm: N − 1 messages, at most (N−1)·ceil(numel / N) elements sent per rank.
    Source: nccl-tests, PERFORMANCE.md.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = chunks_of(tensor.contiguous(), world_size)
    buffers = torch.empty_like(chunks[0]), torch.empty_like(chunks[0])
    partial = chunks[(rank - 1) % world_size]
    for step in range(1, world_size):
        mine = chunks[(rank - step - 1) % world_size]
        arrived = buffers[step % 2][: mine.numel()]  # not the buffer that is being sent
        ring_step(partial, arrived, group)
        partial = arrived.add_(mine)
    missing = chunks[0].numel() - partial.numel()
    if missing or world_size == 1:  # pad copies: one rank alone may not get its own memory back
        partial = pad(partial, (0, missing))
    return partial


def gather_around(chunks: list[Tensor], group: ProcessGroup | None = None) -> None:
    """Fill chunks on every rank; chunks[r] is rank r's own, and travels once around the ring."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(world_size - 1):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        ring_step(chunks[outgoing], chunks[incoming], group)


@torch.no_grad()
def ring_all_gather(shard: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Put the shards of the group's N ranks one after the other, on every rank.

    Shapes: shard: [n], the same n on every rank → [N * n]
    Comm: N − 1 messages of shard's bytes.
    Source: nccl-tests, PERFORMANCE.md.
    """
    gathered = shard.new_empty(dist.get_world_size(group), shard.numel())
    gathered[dist.get_rank(group)] = shard.flatten()
    gather_around(list(gathered), group)
    return gathered.view(-1)


@torch.no_grad()
def ring_all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Replace tensor, in place, by its sum over the group's N ranks: the same bits on each.

    Comm: 2(N−1) messages, at most 2(N−1)·ceil(numel / N) elements sent per rank.
    Source: nccl-tests, PERFORMANCE.md.
    """
    whole = tensor.contiguous()
    chunks = chunks_of(whole, dist.get_world_size(group))
    mine = chunks[dist.get_rank(group)]
    mine.copy_(ring_reduce_scatter(whole, group)[: mine.numel()])
    gather_around(chunks, group)
    if whole is not tensor:
        tensor.copy_(whole)


@torch.no_grad()
def tree_broadcast(tensor: Tensor, src: int = 0, group: ProcessGroup | None = None) -> None:
    """Replace tensor, in place, by global rank src's, along a binomial tree.

    Comm: ceil(log2 N) rounds; N − 1 messages of tensor's bytes over all ranks, at most one received by each.
    """
    group = dist.group.WORLD if group is None else group
    world_size, root = dist.get_world_size(group), dist.get_group_rank(group, src)
    place = (dist.get_rank(group) - root) % world_size  # src is at place 0
    whole = tensor.contiguous()
    reach = 1  # places below it have the tensor
    while reach < world_size:
        if place < reach and place + reach < world_size:
            dist.send(whole, group=group, group_dst=(place + reach + root) % world_size)
        elif reach <= place < 2 * reach:
            dist.recv(whole, group=group, group_src=(place - reach + root) % world_size)
        reach *= 2
    if whole is not tensor:
        tensor.copy_(whole)


def ring_step_in_turns(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None) -> None:
    """Do what ring_step does with send and recv alone, which wait for the other side.

    Comm: one message of outgoing's bytes; 2 turns for an even number of ranks, 3 for an odd one.
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
    """Do what ring_reduce_scatter does, every rank sending each other one its chunk directly.

    Shapes: tensor: any → [ceil(numel / N)]
    Comm: one all_to_all_single of the filled-up tensor; (N−1)·ceil(numel / N) elements sent per rank.
    """
    world_size = dist.get_world_size(group)
    flat, missing = tensor.contiguous().view(-1), -tensor.numel() % world_size
    parts = pad(flat, (0, missing)) if missing else flat
    mine = torch.empty_like(parts)
    dist.all_to_all_single(mine, parts, group=group)
    return mine.view(world_size, parts.numel() // world_size).sum(0, dtype=tensor.dtype)
