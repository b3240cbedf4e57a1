# ---
# jupyter:
#   course:
#     module: collectives
#     minutes: 75
#     gpu_per_rank: true
# ---

# %% [markdown]
# # Lab 01 · Collectives by hand
#
# **75 minutes, 16 points.** You build what `dist.all_reduce` does from transfers between two ranks: a reduce-scatter
# and an all-gather around a ring. Then you build a broadcast along a tree, and a reduce-scatter that is launched now
# and waited for later. Later chapters shard gradients, optimizer states and parameters with these collectives.
#
# Each exercise has a check. It draws fresh data every time and hands each rank only its own. It tries 1, 2, 3 and 4
# ranks and subgroups of them, and counts the bytes that each rank sends. Your functions may support tensors that are
# not contiguous, or reject them with a `ValueError` before anything is sent.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import collectives as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
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

# %% [markdown]
# ## Exercise 1.1 · One step around the ring (5 min, 1 point)
#
# The ranks of a group stand in a circle. In one step each sends `outgoing` to its right neighbour, and receives its
# left neighbour's into `incoming`:
# ```python
# for r in range(N):
#     incoming_of[(r + 1) % N][:] = outgoing_of[r]
# ```
# Lab 00's `pass_right`, with a place to receive into, and for any group. When it returns, both messages are done.
#
# Target: one message out, one in. There are at least two ranks.
#
# <details><summary>Hint</summary><code>dist.P2POp(dist.isend, tensor, group=group, group_peer=…)</code> describes a
# message; <code>group_peer</code> counts within the group, as <code>dist.get_rank(group)</code> does.
# <code>dist.batch_isend_irecv</code> launches several together: over NCCL that is what keeps a ring from
# hanging. It returns at once, with a list of works. When is the message of a work done?</details>


# %% tags=["exercise", "export"] grade_id="ring-step"
# %%ranks
def ring_step(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None) -> None:
    """Send outgoing to the right neighbour, and receive the left neighbour's outgoing into incoming.

    Communication: one transfer of outgoing's bytes.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    # One batch, because NCCL must launch both together. The receive comes first: gloo then knows its destination.
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=left)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    for handle in dist.batch_isend_irecv([receive, send]):
        handle.wait()
    ### END SOLUTION


# %% tags=["check"] grade_id="check-ring-step" points=1
check.ring_step()

# %% [markdown]
# ## Exercise 1.2 · Reduce-scatter (12 min, 3 points)
#
# Every rank brings a tensor of the same shape. Rank *r* gets chunk *r* of their sum. This cuts a tensor into chunks:


# %% tags=["export"]
# %%ranks
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


# %%
# %%ranks 0
for elements in (8, 10, 3):
    print([chunk.tolist() for chunk in chunks_of(torch.arange(elements), 4)])

# %% [markdown]
# What the result must equal (a chunk that is short is filled up with zeros):
# ```python
# total = sum(tensor_of[r] for r in range(N))
# shard_of[r] = chunks_of(total, N)[r]
# ```
#
# A partial sum travels once around the ring, to the right, and each rank adds its own part. All N sums are on their
# way at the same time, one at each rank.
#
# Target: **N − 1** steps, each sending **one chunk**: (N−1)/N of the tensor's bytes per rank. The argument is not
# changed, and the shard is new memory, for one rank too. (A copy of the whole tensor is not needed: two chunks are
# room enough.)
#
# <details><summary>Hint</summary>Begin at the end. After the last step rank r must hold chunk r. Which chunk did it
# receive in the last step, then? Which one did its left neighbour send in that step, and receive in the step before?
# Follow it back to the first.</details>


# %% tags=["exercise", "export"] grade_id="ring-reduce-scatter"
# %%ranks
@torch.no_grad()
def ring_reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Add up tensor over the group's N ranks. Rank r gets chunk r of the sum, padded with zeros.

    Sums are rounded to tensor's dtype at every step. The result has memory of its own, for N = 1 too.

    Shape: tensor of any shape; returns [ceil(numel / N)].
    Communication: N − 1 transfers, at most (N−1)·ceil(numel / N) elements sent per rank.
    Source: nccl-tests, PERFORMANCE.md.
    """
    ### BEGIN SOLUTION
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
    ### END SOLUTION


# %% tags=["check"] grade_id="check-ring-reduce-scatter" points=3
check.ring_reduce_scatter()

# %% [markdown]
# ## Exercise 1.3 · All-gather (8 min, 2 points)
#
# The way back: each rank has a shard, all of the same length, and every rank gets all of them, in rank order.
# ```python
# gathered = torch.cat([shard_of[r] for r in range(N)])
# ```
#
# Write it in two parts. `gather_around` does the travelling: it gets N chunks, of which this rank's own is filled,
# and fills the others. `ring_all_gather` makes room for them. (You will see what the first is good for in 1.4.)
#
# Target: **N − 1** steps, one shard each. What arrives goes where it belongs at once, and from there on to the next
# rank: no other copy.


# %% tags=["exercise", "export"] grade_id="ring-all-gather"
# %%ranks
def gather_around(chunks: list[Tensor], group: ProcessGroup | None = None) -> None:
    """Fill chunks on every rank. chunks[r] comes from rank r and is passed once around the ring."""
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    for step in range(world_size - 1):
        outgoing, incoming = (rank - step) % world_size, (rank - step - 1) % world_size
        ring_step(chunks[outgoing], chunks[incoming], group)
    ### END SOLUTION


@torch.no_grad()
def ring_all_gather(shard: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Concatenate the shards of the group's N ranks, in rank order, on every rank.

    Shape: shard [n], the same n on every rank; returns [N · n].
    Communication: N − 1 transfers of shard's bytes.
    Source: nccl-tests, PERFORMANCE.md.
    """
    ### BEGIN SOLUTION
    gathered = shard.new_empty(dist.get_world_size(group), shard.numel())
    gathered[dist.get_rank(group)] = shard.flatten()
    gather_around(list(gathered), group)
    return gathered.view(-1)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-ring-all-gather" points=2
check.ring_all_gather()

# %% [markdown]
# ## Exercise 1.4 · All-reduce (6 min, 2 points)
#
# Replace `tensor`, in place, by its sum over the ranks. It may have any shape, no element at all, or fewer
# elements than there are ranks.
# ```python
# total = sum(tensor_of[r] for r in range(N))
# for r in range(N):
#     tensor_of[r][...] = total
# ```
# You have both halves.
#
# Target: no rank sends more than 2(N−1)·⌈numel/N⌉ elements, in 2(N−1) messages; and every rank ends with the same
# bits, so that models on different ranks stay equal.
#
# <details><summary>Hint</summary>The tensor itself has room for all N chunks. Which function fills the chunks that it
# is given?</details>


# %% tags=["exercise", "export"] grade_id="ring-all-reduce"
# %%ranks
@torch.no_grad()
def ring_all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Replace tensor, in place, by its sum over the group's N ranks, which is bitwise equal on all of them.

    Communication: 2(N−1) transfers, at most 2(N−1)·ceil(numel / N) elements sent per rank.
    Source: nccl-tests, PERFORMANCE.md.
    """
    ### BEGIN SOLUTION
    whole = tensor.contiguous()
    chunks = chunks_of(whole, dist.get_world_size(group))
    mine = chunks[dist.get_rank(group)]
    mine.copy_(ring_reduce_scatter(whole, group)[: mine.numel()])
    gather_around(chunks, group)
    if whole is not tensor:
        tensor.copy_(whole)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-ring-all-reduce" points=2
check.ring_all_reduce()

# %% [markdown]
# ## Exercise 1.5 · Broadcast along a tree (12 min, 3 points)
#
# Replace `tensor`, in place, by the one of rank `src`. In lab 00 one rank sent to all others, one after the other.
# Here whoever has the tensor helps:
#
# | round | who sends to whom, from `src` = 0 to 8 ranks |
# |---|---|
# | 1 | 0 → 1 |
# | 2 | 0 → 2, 1 → 3 |
# | 3 | 0 → 4, 1 → 5, 2 → 6, 3 → 7 |
#
# Target: ⌈log₂ N⌉ rounds, N − 1 messages in all, each rank receives at most once; any N, any `src`. (Another order of
# the same rounds is as good.) As in `dist.broadcast`, `src` is a *global* rank, in a group too;
# `dist.get_group_rank(group, src)` is its place in the group (for all ranks together, `dist.group.WORLD`).
#
# <details><summary>Hint</summary>Number the ranks from <code>src</code> on, around the circle: then <code>src</code>
# is at place 0. Who has the tensor when round k begins? Who gets it in round k, and is there anybody at that place?
# <code>dist.send(tensor, group=group, group_dst=…)</code> and <code>dist.recv(…, group_src=…)</code> count within the
# group, as <code>group_peer</code> did; plain <code>dst</code> and <code>src</code> are global ranks.</details>


# %% tags=["exercise", "export"] grade_id="tree-broadcast"
# %%ranks
@torch.no_grad()
def tree_broadcast(tensor: Tensor, src: int = 0, group: ProcessGroup | None = None) -> None:
    """Replace tensor, in place, by that of global rank src, along a binomial tree.

    Communication: ceil(log2 N) rounds; N − 1 transfers of tensor's bytes over all ranks, at most one to each.
    """
    ### BEGIN SOLUTION
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
    ### END SOLUTION


# %% tags=["check"] grade_id="check-tree-broadcast" points=3
check.tree_broadcast()

# %% [markdown]
# ## Exercise 1.6 · Break it, then mend it (8 min, 2 points)
#
# A course on the web builds its ring like this. **Predict** before you run it: in which call will the doctor find rank
# 2, and for which call of which rank does it wait? And if it ran, how many bytes would it send, compared with yours?


# %% tags=["raises-exception"]
# %%ranks
def published_ring_all_reduce(tensor):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    travelling, arrived = tensor.clone(), torch.empty_like(tensor)
    for _ in range(world_size - 1):
        dist.send(travelling, dst=right)
        dist.recv(arrived, src=left)
        tensor += arrived
        travelling.copy_(arrived)


published_ring_all_reduce(torch.ones(4, device=device))

# %% [markdown]
# Read the doctor's table as a circle. (Had it run, each rank would have sent N − 1 whole tensors: N/2 times your
# bytes.)
#
# `dist.send` and `dist.recv` wait for the other side. A ring step can be built from these two alone: not all ranks may
# begin with the same one. In one *turn* a rank takes part in one message at most. Write the step so that all N messages
# are done in **2 turns** where N is even, in 3 where it is odd.
#
# <details><summary>Hint</summary>If rank 0 alone receives last, the circle is open, and nothing hangs. In which turn
# does the last rank's message leave then?</details>


# %% tags=["exercise", "export"] grade_id="ring-step-in-turns"
# %%ranks
def ring_step_in_turns(
    outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None
) -> None:
    """Do what ring_step does with send and recv alone, each of which waits for the other side.

    Communication: one transfer of outgoing's bytes; 2 turns for an even number of ranks, 3 for an odd one.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    if rank % 2 == 0:
        dist.send(outgoing, group=group, group_dst=right)
    dist.recv(incoming, group=group, group_src=left)
    if rank % 2 == 1:
        dist.send(outgoing, group=group, group_dst=right)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-ring-step-in-turns" points=2
check.ring_step_in_turns()

# %% [markdown]
# ## Exercise 1.7 · Stretch: all at once (5 min, 1 point)
#
# With `dist.all_to_all_single`, each rank sends one chunk of a tensor to every rank and receives one from each. Write
# a reduce-scatter with it.
#
# - The result equals that of `ring_reduce_scatter`.
# - There is **one** call, of at most N·⌈numel/N⌉ elements.
#
# <details><summary>Hint</summary>Which chunks of which ranks must be in one place so that rank r can add them up? Pad
# the tensor, so that all chunks have one length.</details>


# %% tags=["exercise", "export"] grade_id="direct-reduce-scatter"
# %%ranks
@torch.no_grad()
def direct_reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Do what ring_reduce_scatter does, with every rank sending each chunk directly to its owner.

    Shape: tensor of any shape; returns [ceil(numel / N)].
    Communication: one all_to_all_single of the padded tensor; (N−1)·ceil(numel / N) elements sent per rank.
    """
    ### BEGIN SOLUTION
    world_size = dist.get_world_size(group)
    flat, missing = tensor.contiguous().view(-1), -tensor.numel() % world_size
    chunks = pad(flat, (0, missing)) if missing else flat
    received = torch.empty_like(chunks)
    dist.all_to_all_single(received, chunks, group=group)
    return received.view(world_size, chunks.numel() // world_size).sum(0, dtype=tensor.dtype)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-direct-reduce-scatter" points=1
check.direct_reduce_scatter()

# %% [markdown]
# ## Exercise 1.8 · Launch now, wait later (15 min, 2 points)
#
# Every collective so far has returned when it was complete. From chapter 04 on, communication will run while backward
# computes. For that, a function **launches** a collective and returns at once with a **handle**. The caller computes
# something else, and calls the handle's `wait()` when it needs the result.
#
# Three pieces are given. `InFlight` launches any number of transfers between two ranks. `exchanges_directly` decides
# whether it is used, or the backend's own collective. `launch_all_gather` uses both: it is a model for what you will
# write.


# %% tags=["export"]
# %%ranks
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
        operations = [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer)
            for tensor, peer in receives
        ]
        operations += [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in sends
        ]
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


# %% tags=["export"]
# %%ranks
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
    return InFlight(
        [(shards[rank], peer) for peer in peers], [(shards[peer], peer) for peer in peers], group
    )


# %% [markdown]
# Write `DirectReduceScatter`, a reduce-scatter in flight:
#
# - `DirectReduceScatter(shards, group)` gets one tensor per rank of the group: `shards[r]` is what this rank
#   contributes to rank r's sum. It launches all transfers and returns without waiting for any.
# - `wait()` waits for them, adds what was received to this rank's own shard in place, and returns that shard.
# - A caller may have several of them in flight, and wait for them in any order.
#
# Target: each rank sends (N−1)/N of the bytes of `shards`. Besides `shards` there is memory for what is received,
# (N−1)/N of those bytes, and no other copy.
#
# <details><summary>Hint 1</summary>Who sends this rank something, and how many shards arrive? Each needs memory of its
# own until <code>wait()</code>.</details>
# <details><summary>Hint 2</summary><code>InFlight</code> does the launching. Which pairs of a tensor and a rank does it
# need for the sends, and which for the receives?</details>


# %% tags=["exercise", "export"] grade_id="direct-reduce-scatter-in-flight"
# %%ranks
class DirectReduceScatter:
    """A reduce-scatter in flight: every rank sends each shard to its owner, and the owner adds up what it receives.

    Memory: (N−1)/N of the tensor's bytes for what is received.
    """

    def __init__(self, shards: Sequence[Tensor], group: ProcessGroup | None):
        ### BEGIN SOLUTION
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        peers = [peer for peer in range(world_size) if peer != rank]
        self.own = shards[rank]
        self.received = self.own.new_empty(len(peers), self.own.numel())
        receives = list(zip(self.received, peers, strict=True))
        self.in_flight = InFlight([(shards[peer], peer) for peer in peers], receives, group)
        ### END SOLUTION

    def wait(self) -> Tensor:
        """Return this rank's shard of the sum, when it is complete."""
        ### BEGIN SOLUTION
        self.in_flight.wait()
        for shard in self.received:
            self.own += shard
        return self.own
        ### END SOLUTION


# %% [markdown]
# `launch_reduce_scatter` is given. It uses your class, or the backend's own reduce-scatter where that is better. The
# check calls `launch_reduce_scatter`.


# %% tags=["export"]
# %%ranks
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


# %% tags=["check"] grade_id="check-launch-reduce-scatter" points=2
check.launch_reduce_scatter()

# %% [markdown]
# Two more collectives that later labs use are given. `reduce_scatter_` waits, but cuts a large tensor into pieces and
# has two of them in flight at a time, so that little memory is needed for what is received. `gather_shards`
# concatenates the shards of all ranks on one rank or on all, for checkpoints.


# %% tags=["export"]
# %%ranks
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


# %% tags=["export"]
# %%ranks
def gather_shards(
    shard: Tensor, group: ProcessGroup | None = None, dst: int | None = None
) -> Tensor | None:
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


# %% [markdown]
# ## Your own figures
#
# First: do they agree with torch's? With whole numbers to the last bit.


# %%
# %%ranks
mine = torch.arange(10_000, device=device) * (rank + 1)

theirs = mine.clone()
dist.all_reduce(theirs)
ours = mine.clone()
ring_all_reduce(ours)
print("all-reduce equal:", torch.equal(ours, theirs))

shard = ring_reduce_scatter(mine)
print("reduce-scatter equal:", torch.equal(shard, theirs.view(world_size, -1)[rank]))
print("all-gather equal:", torch.equal(ring_all_gather(shard), theirs))

tree_broadcast(ours.zero_() if rank != 2 else ours, src=2)
print("broadcast equal:", torch.equal(ours, theirs))

# %% [markdown]
# Who sends how much to whom, when 4 MB are summed? In lesson 00 rank 0 took in 12 MB and gave out 12; in lab 00 each
# rank passed three whole tensors on, 12 MB. **Predict**: how many MB does each rank send now?

# %%
my_prediction_mb = 0.0


# %%
# %%ranks
from shared import wire


def sent_by(collective, elements=1_000_000):
    """→ the MB that this rank sends to each rank, and in how many messages"""
    with wire.ledger() as log:
        collective(torch.ones(elements, device=device))
    sends = [entry for entry in log.entries if entry.op == "send"]
    to = [sum(e.payload_bytes for e in sends if e.partner == r) / 1e6 for r in range(world_size)]
    return to, len(sends)


sent_mb, messages = sent_by(ring_all_reduce)

# %%
sent_mb, messages = ranks.pull("sent_mb"), ranks.pull("messages")
print(f"predicted {my_prediction_mb:g} MB, sent {[sum(row) for row in sent_mb]}")
print(f"in {messages} messages")
plots.traffic(sent_mb)

# %% [markdown]
# Half of lab 00's bytes, in twice as many messages. With 64 ranks a rank still sends less than twice the tensor; in
# lab 00's circle it would send 63 times the tensor.
#
# The tree, from rank 1. **Predict** the map: which rank sends most, and which nothing?

# %%
# %%ranks
sent_mb, messages = sent_by(lambda tensor: tree_broadcast(tensor, src=1))

# %%
plots.traffic(ranks.pull("sent_mb"))

# %% [markdown]
# Now time. In the default group the ranks compare notes before each all-reduce, to name a mismatch (chapter 00). In a
# new group they do not:

# %%
# %%ranks
import time

plain = dist.new_group()


def fastest_ms(collective, elements, rounds=10):
    """Time collective(tensor, group), all ranks starting together. → the best"""
    tensor = torch.zeros(elements, device=device)
    collective(tensor, group=plain)
    times_s = []
    for _ in range(rounds):
        dist.barrier(plain)
        began_s = time.perf_counter()
        collective(tensor, group=plain)
        tensor[0].item()
        times_s.append(time.perf_counter() - began_s)
    return 1000 * min(times_s)


# %%
# %%ranks
sizes = [4**power for power in range(5, 12)]
ring_ms = [fastest_ms(ring_all_reduce, size) for size in sizes]
torch_ms = [fastest_ms(dist.all_reduce, size) for size in sizes]


# %% tags=["nbval-ignore-output"]
def last_ranks(name):
    return [max(times) for times in zip(*ranks.pull(name), strict=True)]


sizes_bytes = [4 * size for size in ranks.pull("sizes")[0]]
times_ms = {"your ring": last_ranks("ring_ms"), "torch": last_ranks("torch_ms")}
plots.message_cost(sizes_bytes, times_ms)

# %% [markdown]
# In the reduce-scatter you gain more: gloo's is an all-reduce inside, of which each rank keeps its shard. Yours sends
# half of that.

# %%
# %%ranks
torchs = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def torchs_reduce_scatter(tensor, group):
    torchs(tensor.new_empty(tensor.numel() // world_size), tensor, group=group)


ring_ms = [fastest_ms(ring_reduce_scatter, size) for size in sizes]
direct_ms = [fastest_ms(direct_reduce_scatter, size) for size in sizes]
torch_ms = [fastest_ms(torchs_reduce_scatter, size) for size in sizes]

# %% tags=["nbval-ignore-output"]
times_ms = {
    "your ring": last_ranks("ring_ms"),
    "all to all": last_ranks("direct_ms"),
    "torch": last_ranks("torch_ms"),
}
plots.message_cost(sizes_bytes, times_ms)

# %% [markdown]
# The ring and the all-to-all send the same bytes. Which is faster for small tensors, which for large ones, and what
# else do they differ in? A library may choose by size: NCCL does, between rings and trees (its `NCCL_ALGO`).
#
# You can now say what every collective of the following chapters must send. Chapter 02 trains with one of them.

# %%
ranks.stop()
