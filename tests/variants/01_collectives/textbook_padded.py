"""Follows the textbook: a padded copy, in-place sums, isend and irecv by global rank, a tree with halving distances.

A tensor that is not contiguous is rejected.

needs gloo: ring_step
"""

import torch
import torch.distributed as dist


def _members(group):
    return dist.get_process_group_ranks(dist.group.WORLD if group is None else group)


def _reject_strided(tensor):
    if not tensor.is_contiguous():
        raise ValueError(f"expects a contiguous tensor, got strides {tensor.stride()}")


def ring_step(outgoing, incoming, group=None):
    ranks = _members(group)
    position = ranks.index(dist.get_rank())
    handles = [
        dist.isend(outgoing, dst=ranks[(position + 1) % len(ranks)], group=group),
        dist.irecv(incoming, src=ranks[position - 1], group=group),
    ]
    for handle in reversed(handles):
        handle.wait()


@torch.no_grad()
def ring_reduce_scatter(tensor, group=None):
    _reject_strided(tensor)
    ranks = _members(group)
    n, position = len(ranks), ranks.index(dist.get_rank())
    size = (tensor.numel() + n - 1) // n
    table = torch.zeros(n * size, dtype=tensor.dtype, device=tensor.device)
    table[: tensor.numel()] = tensor.flatten()
    table = table.view(n, size)
    received = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    for k in range(n - 1):
        ring_step(table[(position - k - 1) % n], received, group)
        table[(position - k - 2) % n] += received
    return table[position].clone()


@torch.no_grad()
def ring_all_gather(shard, group=None):
    _reject_strided(shard)
    ranks = _members(group)
    position = ranks.index(dist.get_rank())
    pieces = {position: shard.clone()}
    for k in range(len(ranks) - 1):
        source = (position - k - 1) % len(ranks)
        pieces[source] = torch.empty_like(shard)
        ring_step(pieces[(position - k) % len(ranks)], pieces[source], group)
    return torch.cat([pieces[index] for index in range(len(ranks))])


@torch.no_grad()
def ring_all_reduce(tensor, group=None):
    _reject_strided(tensor)
    total = ring_all_gather(ring_reduce_scatter(tensor, group), group)
    tensor.copy_(total[: tensor.numel()].view_as(tensor))
    return tensor


@torch.no_grad()
def tree_broadcast(tensor, src=0, group=None):
    _reject_strided(tensor)
    ranks = _members(group)
    n, root = len(ranks), ranks.index(src)
    position = (ranks.index(dist.get_rank()) - root) % n
    distance = 1
    while distance < n:
        distance *= 2
    has_it = position == 0
    while distance > 1:
        distance //= 2
        if has_it and position + distance < n:
            dist.send(tensor, dst=ranks[(position + distance + root) % n], group=group)
        elif not has_it and position % distance == 0:
            dist.recv(tensor, src=ranks[(position - distance + root) % n], group=group)
            has_it = True


def ring_step_in_turns(outgoing, incoming, group=None):
    ranks = _members(group)
    position = ranks.index(dist.get_rank())
    sending = (dist.send, outgoing, ranks[(position + 1) % len(ranks)])
    receiving = (dist.recv, incoming, ranks[position - 1])
    for call, tensor, partner in (receiving, sending) if position % 2 == 0 else (sending, receiving):
        call(tensor, partner, group)


@torch.no_grad()
def direct_reduce_scatter(tensor, group=None):
    _reject_strided(tensor)
    n = dist.get_world_size(group)
    size = (tensor.numel() + n - 1) // n
    table = torch.zeros(n * size, dtype=tensor.dtype, device=tensor.device)
    table[: tensor.numel()] = tensor.flatten()
    dist.all_to_all_single(table, table.clone(), group=group)
    first, *others = table.view(n, size).unbind()
    return sum(others, first.clone())


class _Exchange:
    def __init__(self, flat, group):
        self.received = torch.empty_like(flat)
        self.n = dist.get_world_size(group)
        self.own = flat.view(self.n, -1)[dist.get_rank(group)]
        self.work = dist.all_to_all_single(self.received, flat, group=group, async_op=True)

    def wait(self):
        self.work.wait()
        return self.own.copy_(self.received.view(self.n, -1).sum(0))


def launch_reduce_scatter(flat, group=None):
    return _Exchange(flat, group)
