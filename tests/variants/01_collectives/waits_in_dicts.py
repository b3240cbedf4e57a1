"""Keeps handles in dicts by direction, returns early, tests is_completed() after wait(), and sends in a loop of peers.

needs gloo: ring_step
"""

import torch
import torch.distributed as dist
from torch.nn.functional import pad


def ring_step(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    handles = {
        "recv": dist.irecv(incoming, group=group, group_src=(rank + world_size - 1) % world_size),
        "send": dist.isend(outgoing, group=group, group_dst=(rank + 1) % world_size),
    }
    [handle.wait() for handle in handles.values()]
    assert all(handle.is_completed() for handle in handles.values())


def _chunks(tensor, world_size):
    flat, size = tensor.view(-1), -(-tensor.numel() // world_size)
    return [flat[index * size : (index + 1) * size] for index in range(world_size)]


@torch.no_grad()
def ring_reduce_scatter(tensor, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = _chunks(tensor.contiguous(), world_size)
    partial_sum = chunks[(rank - 1) % world_size]
    for step in range(1, world_size):
        chunk = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(chunk)
        ring_step(partial_sum, incoming, group)
        partial_sum = incoming + chunk
    return pad(partial_sum, (0, chunks[0].numel() - partial_sum.numel())).clone()


def gather_around(chunks, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    current = rank
    for _ in range(world_size - 1):
        previous = (current - 1) % world_size
        ring_step(chunks[current], chunks[previous], group)
        current = previous


@torch.no_grad()
def ring_all_gather(shard, group=None):
    gathered = shard.new_empty(dist.get_world_size(group), shard.numel())
    gathered[dist.get_rank(group)] = shard.flatten()
    gather_around(list(gathered), group)
    return gathered.view(-1)


@torch.no_grad()
def ring_all_reduce(tensor, group=None):
    contiguous = tensor.contiguous()
    chunks = _chunks(contiguous, dist.get_world_size(group))
    own_chunk = chunks[dist.get_rank(group)]
    own_chunk[:] = ring_reduce_scatter(tensor, group).narrow(0, 0, own_chunk.numel())
    gather_around(chunks, group)
    if contiguous is not tensor:
        tensor.copy_(contiguous)


@torch.no_grad()
def tree_broadcast(tensor, src=0, group=None):
    """Halve the ranks recursively: the first of each half gets the tensor from the first of all."""
    group = group or dist.group.WORLD
    size, root = dist.get_world_size(group), dist.get_group_rank(group, src)
    me, buffer = (dist.get_rank(group) - root) % size, tensor.contiguous()

    def halve(first, end):
        if end - first < 2:
            return
        middle = (first + end + 1) // 2
        if me == first:
            dist.send(buffer, group=group, group_dst=(middle + root) % size)
        elif me == middle:
            dist.recv(buffer, group=group, group_src=(first + root) % size)
        halve(*((first, middle) if me < middle else (middle, end)))

    halve(0, size)
    if buffer is not tensor:
        tensor.copy_(buffer)


def ring_step_in_turns(outgoing, incoming, group=None):
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    if rank & 1:
        dist.recv(incoming, group=group, group_src=left)
        dist.send(outgoing, group=group, group_dst=right)
        return
    dist.send(outgoing, group=group, group_dst=right)
    dist.recv(incoming, group=group, group_src=left)


@torch.no_grad()
def direct_reduce_scatter(tensor, group=None):
    rows = pad(tensor.flatten(), (0, -tensor.numel() % dist.get_world_size(group))).clone()
    received = torch.empty_like(rows)
    dist.all_to_all_single(received, rows, group=group)
    return received.view(dist.get_world_size(group), -1).sum(0, dtype=tensor.dtype)


class _Rows:
    def __init__(self, flat, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.rows = flat.view(size, -1)
        self.own = self.rows[rank]
        self.received = {peer: torch.empty_like(self.own) for peer in range(size) if peer != rank}
        operations = [
            dist.P2POp(call, row, group=group, group_peer=peer)
            for peer, arriving in self.received.items()
            for call, row in ((dist.isend, self.rows[peer]), (dist.irecv, arriving))
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else ()

    def wait(self):
        for work in self.works:
            work.wait()
        for _, arrived in sorted(self.received.items()):
            self.own += arrived
        return self.own


def launch_reduce_scatter(flat, group=None):
    return _Rows(flat, group)
