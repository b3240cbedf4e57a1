# Built by `make notebooks` from source/01_collectives/lab.py: edit that, not this.
"""Collectives by hand: reduce-scatter, all-gather and all-reduce around a ring, broadcast along a tree.

A tensor is cut into N chunks of ceil(numel / N) elements, and chunk r belongs to rank r. If N does not divide numel,
the last chunks are shorter, or empty. Like torch's collectives, none of these records a gradient.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import pad

from shared.c10d import all_gather_single, reduce_scatter_single


def ring_step(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None) -> None:
    """Send outgoing to the right neighbour, and receive the left neighbour's outgoing into incoming.

    Communication: one transfer of outgoing's bytes.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    # One batch, because NCCL must launch both together. The receive comes first: gloo then knows its destination.
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=left)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    for handle in dist.batch_isend_irecv([receive, send]):
        handle.wait()


def chunks_of(tensor: Tensor, world_size: int) -> list[Tensor]:
    """Cut a contiguous tensor into world_size flat views, of which the last may be shorter, or empty.

    Raises:
        ValueError: if tensor is not contiguous, because no view of it is flat then.

    Shape: returns world_size tensors of at most ceil(numel / world_size) elements.
    """
    if not tensor.is_contiguous():
        raise ValueError("chunks are views, so the tensor must be contiguous")
    flat, size = tensor.view(-1), -(-tensor.numel() // world_size)
    return [flat[index * size : (index + 1) * size] for index in range(world_size)]


@torch.no_grad()
def ring_reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Add up tensor over the group's N ranks. Rank r gets chunk r of the sum, padded with zeros.

    Sums are rounded to tensor's dtype at every step. The result has memory of its own, for N = 1 too.

    Shape: tensor of any shape; returns [ceil(numel / N)].
    Communication: N − 1 transfers, at most (N−1)·ceil(numel / N) elements sent per rank.
    Source: nccl-tests, PERFORMANCE.md.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = chunks_of(tensor.contiguous(), world_size)
    buffers = torch.empty_like(chunks[0]), torch.empty_like(chunks[0])
    partial = chunks[(rank - 1) % world_size]
    for step in range(1, world_size):
        mine = chunks[(rank - step - 1) % world_size]
        arrived = buffers[step % 2][: mine.numel()]  # never the one that holds partial
        ring_step(partial, arrived, group)
        partial = arrived.add_(mine)
    missing = chunks[0].numel() - partial.numel()
    if missing or world_size == 1:  # pad copies: a single rank must not get its own memory back
        partial = pad(partial, (0, missing))
    return partial


def gather_around(chunks: list[Tensor], group: ProcessGroup | None = None) -> None:
    """Fill chunks on every rank. chunks[r] comes from rank r and is passed once around the ring."""
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
    """Replace tensor, in place, by its sum over the group's N ranks, which is bitwise equal on all of them.

    Communication: 2(N−1) transfers, at most 2(N−1)·ceil(numel / N) elements sent per rank.
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
    """Replace tensor, in place, by that of global rank src, along a binomial tree.

    Communication: ceil(log2 N) rounds; N − 1 transfers of tensor's bytes over all ranks, at most one to each.
    """
    group = dist.group.WORLD if group is None else group
    world_size, root = dist.get_world_size(group), dist.get_group_rank(group, src)
    index = (dist.get_rank(group) - root) % world_size  # src has index 0
    whole = tensor.contiguous()
    reach = 1  # the ranks whose index is smaller have the tensor
    while reach < world_size:
        if index < reach and index + reach < world_size:
            dist.send(whole, group=group, group_dst=(index + reach + root) % world_size)
        elif reach <= index < 2 * reach:
            dist.recv(whole, group=group, group_src=(index - reach + root) % world_size)
        reach *= 2
    if whole is not tensor:
        tensor.copy_(whole)


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
    """Do what ring_reduce_scatter does, with every rank sending each chunk directly to its owner.

    Shape: tensor of any shape; returns [ceil(numel / N)].
    Communication: one all_to_all_single of the padded tensor; (N−1)·ceil(numel / N) elements sent per rank.
    """
    world_size = dist.get_world_size(group)
    flat, missing = tensor.contiguous().view(-1), -tensor.numel() % world_size
    chunks = pad(flat, (0, missing)) if missing else flat
    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks, group=group)
    return received.view(world_size, chunks.numel() // world_size).sum(0, dtype=tensor.dtype)


class InFlight:
    """Point-to-point transfers in flight. Call wait() before you read what is received or reuse what is sent.

    Args:
        sends: pairs of a tensor and the group rank that gets it.
        receives: pairs of a tensor to fill and the group rank that sends it.
    """

    def __init__(
        self,
        sends: list[tuple[Tensor, int]],
        receives: list[tuple[Tensor, int]],
        group: ProcessGroup | None,
    ):
        operations = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for tensor, peer in receives]
        operations += [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in sends]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Return when every transfer is complete."""
        for work in self.works:
            work.wait()


def exchanges_directly(tensor: Tensor, group: ProcessGroup | None = None) -> bool:
    """Tell whether shards are exchanged by point-to-point transfers instead of the backend's own collective.

    gloo's reduce-scatter is an all-reduce inside, and its all-gather makes an extra copy, so on gloo we send every
    shard to its rank directly. gloo cannot send from a GPU; there, and on NCCL, the backend's own collective runs.
    """
    return dist.get_backend(group) == "gloo" and not tensor.is_cuda


def launch_all_gather(flat: Tensor, shard: Tensor, group: ProcessGroup | None = None):
    """Launch an all-gather that fills flat with every rank's shard, in rank order.

    Returns:
        A handle; flat is complete after its wait().

    Shape: flat [N · n]; shard [n], which may be this rank's shard of flat.
    Communication: one all-gather; each rank sends (N−1)/N of flat's bytes.
    """
    if not exchanges_directly(flat, group):
        return all_gather_single(flat, shard, group=group, async_op=True)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    shards = flat.view(world_size, -1)
    if shards[rank].data_ptr() != shard.data_ptr():
        shards[rank].copy_(shard)
    peers = [peer for peer in range(world_size) if peer != rank]
    return InFlight([(shards[rank], peer) for peer in peers], [(shards[peer], peer) for peer in peers], group)


class DirectReduceScatter:
    """A reduce-scatter in flight: every rank sends each shard to its owner, and the owner adds up what it receives.

    Memory: (N−1)/N of the tensor's bytes for what is received.
    """

    def __init__(self, shards: Sequence[Tensor], group: ProcessGroup | None):
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        peers = [peer for peer in range(world_size) if peer != rank]
        self.own = shards[rank]
        self.received = self.own.new_empty(len(peers), self.own.numel())
        receives = list(zip(self.received, peers, strict=True))
        self.in_flight = InFlight([(shards[peer], peer) for peer in peers], receives, group)

    def wait(self) -> Tensor:
        """Return this rank's shard of the sum, when it is complete."""
        self.in_flight.wait()
        for shard in self.received:
            self.own += shard
        return self.own


class BackendReduceScatter:
    """A reduce-scatter in flight, run by the backend in place."""

    def __init__(self, flat: Tensor, group: ProcessGroup | None):
        self.own = flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
        self.work = reduce_scatter_single(self.own, flat, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Return this rank's shard of the sum, when it is complete."""
        self.work.wait()
        return self.own


def launch_reduce_scatter(
    flat: Tensor, group: ProcessGroup | None = None
) -> DirectReduceScatter | BackendReduceScatter:
    """Launch a reduce-scatter of flat over the group's N ranks.

    Returns:
        A handle. Its wait() returns this rank's shard of the sum: a view of flat, whose other shards are used up.

    Shape: flat [N · n]; wait() returns [n].
    Communication: one reduce-scatter; each rank sends (N−1)/N of flat's bytes.
    Memory: (N−1)/N of flat's bytes until wait() returns, where shards are exchanged directly.
    """
    if exchanges_directly(flat, group):
        return DirectReduceScatter(flat.view(dist.get_world_size(group), -1), group)
    return BackendReduceScatter(flat, group)


PIECE_NUMEL = 2**20  # elements of all ranks together that reduce_scatter_ has in flight at a time


def reduce_scatter_(flat: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Reduce-scatter flat in place, a piece at a time, so that little memory is needed for what is received.

    Returns:
        This rank's shard of the sum, a view of flat, whose other shards are used up.

    Shape: flat [N · n]; returns [n].
    Communication: one reduce-scatter; each rank sends (N−1)/N of flat's bytes.
    Memory: two pieces of PIECE_NUMEL elements.
    """
    if not exchanges_directly(flat, group):
        return BackendReduceScatter(flat, group).wait()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    shards = flat.view(world_size, -1)
    in_flight = None
    for pieces in shards.split(PIECE_NUMEL // world_size, dim=1):
        # In flight while the previous piece is added up.
        launched = DirectReduceScatter(pieces, group)
        if in_flight is not None:
            in_flight.wait()
        in_flight = launched
    in_flight.wait()
    return shards[rank]


def gather_shards(shard: Tensor, group: ProcessGroup | None = None, dst: int | None = None) -> Tensor | None:
    """Concatenate the shards of all ranks, in rank order, on group rank dst, or on every rank if dst is None.

    Returns:
        The flat tensor; None on ranks other than dst.

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
