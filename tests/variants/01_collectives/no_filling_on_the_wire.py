"""Uses blocking calls in turns, chunks without padding (none is sent empty), in-place rings, and lists of rounds."""

import torch
import torch.distributed as dist


def _exchange(outgoing, incoming, group):
    """Send to the right and receive from the left; even ranks send first. Empty tensors are not sent."""
    index, n = dist.get_rank(group), dist.get_world_size(group)
    steps = [
        (dist.send, outgoing, {"group_dst": (index + 1) % n}),
        (dist.recv, incoming, {"group_src": (index - 1) % n}),
    ]
    for call, tensor, partner in steps if index % 2 == 0 else steps[::-1]:
        if tensor.numel():
            call(tensor, group=group, **partner)


def _views(flat, n):
    size = max(1, -(-flat.numel() // n))
    views = list(flat.split(size)) if flat.numel() else []
    return views + [flat[:0]] * (n - len(views))


def _around(chunks, group, offset, add):
    index, n = dist.get_rank(group), len(chunks)
    for step in range(n - 1):
        mine = chunks[(index - step - offset - 1) % n]
        arrived = torch.empty_like(mine)
        _exchange(chunks[(index - step - offset) % n], arrived, group)
        mine.copy_(mine + arrived if add else arrived)


@torch.no_grad()
def ring_reduce_scatter(tensor, group=None):
    index, n = dist.get_rank(group), dist.get_world_size(group)
    chunks = _views(tensor.clone(memory_format=torch.contiguous_format).view(-1), n)
    _around(chunks, group, 1, add=True)
    shard = tensor.new_zeros(-(-tensor.numel() // n))
    shard[: chunks[index].numel()] = chunks[index]
    return shard


def gather_around(chunks, group=None):
    _around(chunks, group, 0, add=False)


@torch.no_grad()
def ring_all_gather(shard, group=None):
    chunks = list(torch.zeros(dist.get_world_size(group), shard.numel(), dtype=shard.dtype, device=shard.device))
    chunks[dist.get_rank(group)].copy_(shard)
    gather_around(chunks, group)
    return torch.stack(chunks).flatten()


@torch.no_grad()
def ring_all_reduce(tensor, group=None):
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    chunks = _views(flat, dist.get_world_size(group))
    _around(chunks, group, 1, add=True)
    gather_around(chunks, group)
    tensor.copy_(flat.view(tensor.shape))


def _rounds(order):
    """Yield the (sender, receiver) pairs of each round: each rank that has the tensor sends it to one that does not."""
    have, lack = order[:1], order[1:]
    while lack:
        pairs = list(zip(have, lack, strict=False))
        yield pairs
        have, lack = have + [to for _, to in pairs], lack[len(pairs) :]


@torch.no_grad()
def tree_broadcast(tensor, src=0, group=None):
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    order = [src] + [rank for rank in members if rank != src]
    buffer = tensor.clone(memory_format=torch.contiguous_format)
    for pairs in _rounds(order):
        for sender, receiver in pairs:
            if dist.get_rank() == sender:
                dist.send(buffer, receiver, group)
            if dist.get_rank() == receiver:
                dist.recv(buffer, sender, group)
    tensor.copy_(buffer)


class _Shifts:
    """A batch for each distance to the right at which a rank sends. They are waited for in reverse order."""

    def __init__(self, flat, group):
        index, n = dist.get_rank(group), dist.get_world_size(group)
        chunks = list(flat.chunk(n))
        self.own, self.launched = chunks[index], []
        for distance in range(1, n):
            arrived, right = torch.empty_like(self.own), (index + distance) % n
            operations = [
                dist.P2POp(dist.irecv, arrived, group=group, group_peer=(index - distance) % n),
                dist.P2POp(dist.isend, chunks[right], group=group, group_peer=right),
            ]
            self.launched.append((arrived, dist.batch_isend_irecv(operations)))

    def wait(self):
        for arrived, works in reversed(self.launched):
            for work in works:
                work.wait()
            self.own.add_(arrived)
        return self.own


def launch_reduce_scatter(flat, group=None):
    return _Shifts(flat, group)
