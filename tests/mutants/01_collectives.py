"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

import torch
import torch.distributed as dist

from solutions import async_collectives, collectives
from solutions.async_collectives import InFlight


def step_in_two_messages():
    """Sends the length before the tensor, although the receiver already knows it.

    caught by: ring_step · wire
    """

    def ring_step(outgoing, incoming, group=None):
        length, theirs = torch.tensor([outgoing.numel()]), torch.zeros(1, dtype=torch.int64)
        collectives.ring_step(length, theirs, group)
        assert theirs.item() == incoming.numel()
        collectives.ring_step(outgoing, incoming, group)


def step_keeps_its_send_under_way():
    """Sends a copy and never waits for that send: the values are right, but a message may still be in flight on return.

    caught by: ring_step · waits
    """

    kept = []

    def ring_step(outgoing, incoming, group=None):
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        copy = outgoing.clone()
        kept.append((copy, dist.isend(copy, group=group, group_dst=(rank + 1) % world_size)))
        dist.irecv(incoming, group=group, group_src=(rank - 1) % world_size).wait()


def step_without_waiting_for_recv():
    """Waits only for the send: the incoming tensor may not have been received yet.

    caught by: ring_step · waits
    """

    _in_flight = []

    def ring_step(outgoing, incoming, group=None):
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        _in_flight.append(dist.irecv(incoming, group=group, group_src=(rank - 1) % world_size))
        dist.send(outgoing, group=group, group_dst=(rank + 1) % world_size)


def step_without_waiting_for_send():
    """Waits only for the receive: the outgoing tensor may not have been sent yet.

    caught by: ring_step · waits
    """

    _in_flight = []

    def ring_step(outgoing, incoming, group=None):
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        _in_flight.append(dist.isend(outgoing, group=group, group_dst=(rank + 1) % world_size))
        dist.recv(incoming, group=group, group_src=(rank - 1) % world_size)


def scatter_adds_in_bfloat16():
    """Sends bfloat16 to halve the bytes: the sums keep only about three digits.

    caught by: ring_reduce_scatter · values
    """

    def ring_reduce_scatter(tensor, group=None):
        return collectives.ring_reduce_scatter(tensor.to(torch.bfloat16), group).to(tensor.dtype)


def scatter_adds_in_float32():
    """Reduces bfloat16 tensors in float32, which doubles the bytes.

    caught by: ring_reduce_scatter · wire
    """

    def ring_reduce_scatter(tensor, group=None):
        if tensor.dtype != torch.bfloat16:
            return collectives.ring_reduce_scatter(tensor, group)
        return collectives.ring_reduce_scatter(tensor.float(), group).to(tensor.dtype)


def scatter_keeps_its_buffer():
    """Reuses one result buffer for all calls, so a call overwrites the previous result.

    caught by: ring_reduce_scatter · result
    """

    _kept = {}

    def ring_reduce_scatter(tensor, group=None):
        shard = collectives.ring_reduce_scatter(tensor, group)
        return _kept.setdefault((shard.shape, shard.dtype), torch.empty_like(shard)).copy_(shard)


def gather_into_two_buffers():
    """Alternates between two buffers for the results: the third call overwrites what the first one returned.

    caught by: ring_all_gather · result
    """

    buffers, calls = {}, [0]

    def ring_all_gather(shard, group=None):
        gathered = collectives.ring_all_gather(shard, group)
        calls[0] += 1
        key = calls[0] % 2, gathered.dtype, gathered.numel()
        return buffers.setdefault(key, torch.empty_like(gathered)).copy_(gathered)


def gather_leaves_before_the_last_send():
    """Waits only for the receives: the last shard may be overwritten before it has been sent.

    caught by: ring_all_gather · waits
    """

    _in_flight = []

    def ring_all_gather(shard, group=None):
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        gathered = shard.new_empty(world_size, shard.numel())
        gathered[rank] = shard
        for step in range(world_size - 1):
            outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
            _in_flight.append(dist.isend(gathered[outgoing], group=group, group_dst=(rank + 1) % world_size))
            dist.recv(gathered[incoming], group=group, group_src=(rank - 1) % world_size)
        return gathered.view(-1)


def gather_records_a_gradient():
    """Omits `no_grad`: the result carries an autograd graph that is of no use.

    caught by: ring_all_gather · autograd
    """

    ring_all_gather = collectives.ring_all_gather.__wrapped__


def reduce_by_torch_in_groups():
    """Uses the ring without a group, but torch's `all_reduce` when a group is given.

    caught by: ring_all_reduce · wire
    """

    def ring_all_reduce(tensor, group=None):
        if group is None:
            collectives.ring_all_reduce(tensor)
        else:
            dist.all_reduce(tensor, group=group)


def reduce_in_float32():
    """Reduces bfloat16 tensors in float32: more precise, but twice the bytes.

    caught by: ring_all_reduce · wire
    """

    def ring_all_reduce(tensor, group=None):
        total = tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone()
        collectives.ring_all_reduce(total, group)
        tensor.copy_(total)


def reduce_whole_numbers_as_floats():
    """Sums integers in float32, which rounds integers above 2²⁴.

    caught by: ring_all_reduce · dtypes
    """

    def ring_all_reduce(tensor, group=None):
        total = tensor if tensor.is_floating_point() else tensor.float()
        collectives.ring_all_reduce(total, group)
        if total is not tensor:
            tensor.copy_(total)


def tree_does_not_wait_for_its_sends():
    """Returns without waiting for the sends: `src` may change its tensor before it has been sent.

    caught by: tree_broadcast · waits
    """

    _in_flight = []

    def tree_broadcast(tensor, src=0, group=None):
        group = dist.group.WORLD if group is None else group
        world_size, root = dist.get_world_size(group), dist.get_group_rank(group, src)
        index, reach, whole = (dist.get_rank(group) - root) % world_size, 1, tensor.contiguous()
        while reach < world_size:
            if index < reach and index + reach < world_size:
                _in_flight.append(dist.isend(whole, group=group, group_dst=(index + reach + root) % world_size))
            elif reach <= index < 2 * reach:
                dist.recv(whole, group=group, group_src=(index - reach + root) % world_size)
            reach *= 2
        if whole is not tensor:
            tensor.copy_(whole)


def launched_by_all_reduce():
    """All-reduces the whole tensor and returns the rank's shard of it: twice the bytes.

    caught by: launch_reduce_scatter · wire
    """

    class _AllReduce:
        def __init__(self, flat, group):
            self.own = flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
            self.work = dist.all_reduce(flat, group=group, async_op=True)

        def wait(self):
            self.work.wait()
            return self.own.clone()

    def launch_reduce_scatter(flat, group=None):
        return _AllReduce(flat, group)


def launched_into_one_buffer():
    """Receives all shards into the same memory, so it adds up one of them several times.

    caught by: launch_reduce_scatter · values
    """

    class IntoOneBuffer:
        def __init__(self, shards, group):
            rank, world_size = dist.get_rank(group), dist.get_world_size(group)
            self.peers = [peer for peer in range(world_size) if peer != rank]
            self.own, self.received = shards[rank], torch.empty_like(shards[rank])
            sends = [(shards[peer], peer) for peer in self.peers]
            self.in_flight = async_collectives.InFlight(sends, [(self.received, peer) for peer in self.peers], group)

        def wait(self):
            self.in_flight.wait()
            for _ in self.peers:
                self.own += self.received
            return self.own

    def launch_reduce_scatter(flat, group=None):
        return IntoOneBuffer(flat.view(dist.get_world_size(group), -1), group)


def launched_only_by_wait():
    """Launches nothing until `wait()` is called, so nothing is in flight while the caller computes.

    caught by: launch_reduce_scatter · at once
    """

    class _Postponed:
        def __init__(self, shards, group):
            self.arguments = shards, group

        def wait(self):
            return async_collectives.DirectReduceScatter(*self.arguments).wait()

    def launch_reduce_scatter(flat, group=None):
        return _Postponed(flat.view(async_collectives.dist.get_world_size(group), -1), group)


def launched_sends_only_by_wait():
    """Launches its receives at once, but its sends only in `wait()`.

    caught by: launch_reduce_scatter · at once
    """

    class _SendsLate:
        def __init__(self, shards, group):
            rank, self.group = dist.get_rank(group), group
            peers = [peer for peer in range(dist.get_world_size(group)) if peer != rank]
            self.own, self.sends = shards[rank], [(shards[peer], peer) for peer in peers]
            self.received = self.own.new_empty(len(peers), self.own.numel())
            self.receiving = InFlight([], list(zip(self.received, peers, strict=True)), group)

        def wait(self):
            sending = InFlight(self.sends, [], self.group)
            self.receiving.wait()
            sending.wait()
            for shard in self.received:
                self.own += shard
            return self.own

    def launch_reduce_scatter(flat, group=None):
        return _SendsLate(flat.view(dist.get_world_size(group), -1), group)


def launched_step_by_step():
    """Passes partial sums around a ring, but launches only the first step at once, and each further step in `wait()`.

    caught by: launch_reduce_scatter · at once
    """

    class _Ring:
        def __init__(self, flat, group):
            self.index, self.n, self.group = dist.get_rank(group), dist.get_world_size(group), group
            self.chunks = list(flat.chunk(self.n))
            self.arrived = torch.empty_like(self.chunks[0])
            self.works = self._pass(1) if self.n > 1 else []

        def _pass(self, step):
            outgoing = self.chunks[(self.index - step) % self.n]
            right, left = (self.index + 1) % self.n, (self.index - 1) % self.n
            operations = [
                dist.P2POp(dist.irecv, self.arrived, group=self.group, group_peer=left),
                dist.P2POp(dist.isend, outgoing, group=self.group, group_peer=right),
            ]
            return dist.batch_isend_irecv(operations)

        def wait(self):
            for step in range(1, self.n):
                for work in self.works:
                    work.wait()
                self.chunks[(self.index - step - 1) % self.n] += self.arrived
                if step + 1 < self.n:
                    self.works = self._pass(step + 1)
            return self.chunks[self.index]

    def launch_reduce_scatter(flat, group=None):
        return _Ring(flat, group)


def launched_sum_of_whole_tensors():
    """All-gathers every rank's whole tensor and sums up the shard that it needs: N times the bytes.

    caught by: launch_reduce_scatter · wire
    """

    class _Gathered:
        def __init__(self, flat, group):
            self.rank = dist.get_rank(group)
            self.flats = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
            self.work = dist.all_gather(self.flats, flat, group=group, async_op=True)

        def wait(self):
            self.work.wait()
            return sum(flat.view(len(self.flats), -1)[self.rank] for flat in self.flats)

    def launch_reduce_scatter(flat, group=None):
        return _Gathered(flat, group)


def launched_without_a_handle():
    """Returns a function instead of a handle with a `wait()` method.

    caught by: launch_reduce_scatter · values
    """

    def launch_reduce_scatter(flat, group=None):
        return async_collectives.launch_reduce_scatter(flat, group).wait


def launched_sum_is_added_up_early():
    """Adds up the shards right after it has launched their receives, before they are complete.

    caught by: launch_reduce_scatter · values
    """

    class _AddedUpEarly(async_collectives.DirectReduceScatter):
        def __init__(self, shards, group):
            super().__init__(shards, group)
            for shard in self.received:
                self.own += shard

        def wait(self):
            self.in_flight.wait()
            return self.own

    def launch_reduce_scatter(flat, group=None):
        return _AddedUpEarly(flat.view(dist.get_world_size(group), -1), group)
