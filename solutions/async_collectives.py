# Built by `make notebooks` from source/01_collectives/lab.py: edit that, not this.
"""Asynchronous collectives: launch one now, compute something else, and wait for it later.

A flat tensor consists of N shards of equal length, and shard r belongs to rank r of the group. Each function that
launches a collective returns a handle. Call the handle's wait() before you use the result.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shared.c10d import all_gather_single, reduce_scatter_single


class InFlight:
    """Point-to-point transfers in flight. Call wait() before you read what is received, or overwrite what is sent.

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
        """Wait until every transfer is complete."""
        for work in self.works:
            work.wait()


class DirectReduceScatter:
    """A reduce-scatter in flight: every rank sends each shard to its owner, which adds up what it receives.

    Args:
        shards: what this rank contributes to each rank's sum, one tensor of equal length per rank of the group.

    Communication: one exchange; each rank sends (N−1)/N of the shards' bytes.
    Memory: (N−1)/N of the shards' bytes for what is received, until the handle is dropped.
    """

    def __init__(self, shards: Sequence[Tensor], group: ProcessGroup | None):
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        peers = [peer for peer in range(world_size) if peer != rank]
        self.own = shards[rank]  # wait() turns it into the sum
        self.received = self.own.new_empty(len(peers), self.own.numel())
        receives = list(zip(self.received, peers, strict=True))
        sends = [(shards[peer], peer) for peer in peers]
        self.in_flight = InFlight(sends, receives, group)

    def wait(self) -> Tensor:
        """Wait until the sum is complete, and return this rank's shard of it."""
        self.in_flight.wait()
        for shard in self.received:
            self.own += shard
        return self.own


def exchanges_directly(tensor: Tensor, group: ProcessGroup | None = None) -> bool:
    """Tell whether to exchange shards by point-to-point transfers instead of the backend's own collective.

    In torch, gloo's reduce-scatter is an all-reduce, and its all-gather makes an extra copy. So on gloo we send every
    shard directly to its rank. But gloo cannot send from a GPU. There, and on NCCL, the backend's own collective runs.
    """
    return dist.get_backend(group) == "gloo" and not tensor.is_cuda


class BackendReduceScatter:
    """A reduce-scatter in flight that the backend runs, in place."""

    def __init__(self, flat: Tensor, group: ProcessGroup | None):
        self.own = flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
        self.work = reduce_scatter_single(self.own, flat, group=group, async_op=True)

    def wait(self) -> Tensor:
        """Wait until the sum is complete, and return this rank's shard of it."""
        self.work.wait()
        return self.own


def launch_reduce_scatter(
    flat: Tensor, group: ProcessGroup | None = None
) -> DirectReduceScatter | BackendReduceScatter:
    """Launch a reduce-scatter of flat over the group's N ranks.

    Returns:
        A handle. Its wait() returns this rank's shard of the sum, a view of flat. The other shards of flat hold no
        useful values afterwards.

    Shape: flat [N · n]; wait() returns [n].
    Communication: one reduce-scatter; each rank sends (N−1)/N of flat's bytes.
    Memory: if shards are exchanged directly, (N−1)/N of flat's bytes until the handle is dropped.
    """
    if exchanges_directly(flat, group):
        return DirectReduceScatter(flat.view(dist.get_world_size(group), -1), group)
    return BackendReduceScatter(flat, group)


def launch_all_gather(flat: Tensor, shard: Tensor, group: ProcessGroup | None = None):
    """Launch an all-gather that fills flat with every rank's shard, in rank order.

    Returns:
        A handle: flat is complete after its wait().

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


PIECE_NUMEL = 2**20  # how many elements, of all shards together, reduce_scatter_ launches at a time


def reduce_scatter_(flat: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Reduce-scatter flat in place and wait for it, piece by piece, which needs little memory for what is received.

    Returns:
        This rank's shard of the sum, a view of flat. The other shards of flat hold no useful values afterwards.

    Shape: flat [N · n]; returns [n].
    Communication: one reduce-scatter; each rank sends (N−1)/N of flat's bytes.
    Memory: if shards are exchanged directly, two pieces of PIECE_NUMEL elements.
    """
    if not exchanges_directly(flat, group):
        return BackendReduceScatter(flat, group).wait()
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    shards = flat.view(world_size, -1)
    in_flight = None
    for piece_of_shards in shards.split(PIECE_NUMEL // world_size, dim=1):
        launched = DirectReduceScatter(piece_of_shards, group)
        if in_flight is not None:
            in_flight.wait()  # adds up the previous piece while this one is in flight
        in_flight = launched
    in_flight.wait()
    return shards[rank]
