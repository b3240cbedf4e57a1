# ---
# jupyter:
#   course:
#     module: collectives
#     minutes: 90
# ---

# %% [markdown]
# # Lab 01 · Collectives by hand
#
# **90 minutes, 15 points**, and another 5 minutes and 1 point for a stretch exercise. You build your own all-reduce
# from messages between pairs of ranks: a reduce-scatter and an all-gather on a ring. Then you build a broadcast along a
# tree, and a reduce-scatter that you launch now and wait for later. Later chapters use these functions to shard
# gradients, optimizer states and parameters.
#
# As in the lesson, N is the number of ranks. The code we provide handles most awkward cases, such as a length that is
# not a multiple of N. The bullets name those that you handle. You write your code where the cell says `your code here`.
#
# Each exercise has a check, which draws new data every time and gives each rank only its own. The check's first line,
# `values`, tries tensors whose length is a multiple of N. Once this line passes, the check tries other lengths, dtypes,
# and subgroups of the ranks, counts the bytes that each rank sends, and simulates rings and trees of 5, 7 and 8 ranks.
# In exercises 1.2, 1.3 and 1.7, the result must have memory of its own, because callers keep it.
#
# Each function has an argument `group`: the process group that communicates. `None` means all ranks. Pass `group`
# on to every `dist` function that you call, and to every collective of your own.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import collectives as check
from shared.plots import costs as cost_plots
from shared.predictions import predicted

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
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

# %% [markdown]
# ## Exercise 1.1 · One step around the ring (10 min, 1 point)
#
# In each step of the ring, a rank sends `outgoing` to its right neighbor, and receives its left neighbor's tensor into
# `incoming`:
# ```python
# for r in range(N):
#     incoming_of[(r + 1) % N][:] = outgoing_of[r]
# ```
# This is `pass_right` from lab 00, with two differences: the caller provides the tensor to receive into, and the ring
# consists of the ranks of a group.
#
# - Each rank sends one message and receives one.
# - When the function returns, both are complete.
# - You can assume that there are at least two ranks.
# - As in lab 00, separate calls to `isend` and `irecv` pass the check with gloo. With NCCL, they may hang.
#
# `dist.P2POp(dist.isend, tensor, group=group, group_peer=…)` describes a send. With `dist.irecv`, it describes a
# receive. `group_peer` is the other rank's index within the group; this rank's own is `dist.get_rank(group)`. Launch
# both with `dist.batch_isend_irecv`, which returns a list of handles, and wait for these.
#
# <details><summary>Hint</summary>Which method of a handle returns only when its operation is complete? And is it enough
# to call it for one of the two?</details>


# %% tags=["exercise", "export"] grade_id="ring-step"
# %%ranks
def ring_step(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None) -> None:
    """Send outgoing to the right neighbor, and receive the left neighbor's outgoing into incoming.

    Communication: one transfer of outgoing's bytes.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    ### BEGIN SOLUTION
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    # One batch, because NCCL must launch both together. The receive comes first, so that gloo knows its destination.
    receive = dist.P2POp(dist.irecv, incoming, group=group, group_peer=left)
    send = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    for handle in dist.batch_isend_irecv([receive, send]):
        handle.wait()
    ### END SOLUTION


# %% [markdown]
# Try it before you run the check. Each rank should receive the index of its left neighbor:

# %%
# %%ranks
incoming = torch.empty(1, device=device)
ring_step(torch.full((1,), float(rank), device=device), incoming)
print(f"received {incoming.item():g}")

# %% tags=["check"] grade_id="check-ring-step" points=1
check.ring_step()

# %% [markdown]
# ## Exercise 1.2 · Reduce-scatter (20 min, 3 points)
#
# Every rank has a tensor of the same shape, and rank *r* gets chunk *r* of their sum. The next function, which is
# given, cuts a tensor into chunks. Below it, you see what it does with 8, 10 and 3 elements:


# %% tags=["export"]
# %%ranks
def chunks_of(tensor: Tensor, world_size: int) -> list[Tensor]:
    """Cut a contiguous tensor into world_size flat views, of which the last ones may be shorter, or empty.

    Raises:
        ValueError: if tensor is not contiguous, because it has no flat view then.

    Shape: returns world_size tensors of at most ceil(numel / world_size) elements.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            "chunks are views, so the tensor must be contiguous: call .contiguous() first"
        )
    flat, chunk_numel = tensor.view(-1), -(-tensor.numel() // world_size)  # rounded up
    return [flat[index * chunk_numel : (index + 1) * chunk_numel] for index in range(world_size)]


# %%
# %%ranks 0
for numel in (8, 10, 3):
    print([chunk.tolist() for chunk in chunks_of(torch.arange(numel), 4)])

# %% [markdown]
# Each rank must return its shard of the sum:
# ```python
# total = sum(tensor_of[r] for r in range(N))
# shard_of[r] = chunks_of(total, N)[r]
# ```
# Each chunk has a partial sum, which is passed around the ring, to the right, and every rank adds its own chunk to it.
# The table shows the first three of four ranks. Its “chunk 3” stands for the partial sum of chunk 3:
#
# | step | rank 0 sends | and receives | rank 1 sends | and receives | rank 2 sends | and receives |
# |---|---|---|---|---|---|---|
# | 1 | chunk 3 | chunk 2 | chunk 0 | chunk 3 | chunk 1 | chunk 0 |
# | 2 | chunk 2 | chunk 1 | chunk 3 | chunk 2 | chunk 0 | chunk 3 |
# | 3 | chunk 1 | chunk 0 | chunk 2 | chunk 1 | chunk 3 | chunk 2 |
#
# As in the lesson, rank *r* begins with chunk *r* − 1. The beginning and the end of the function are given: you write
# one step. A rank sends `partial_sum` to the right, and receives the partial sum of another chunk from the left. If it
# receives the partial sum of chunk *c*, it adds its own chunk *c*. Assign the result to `partial_sum`, which the rank
# sends in the next step.
#
# - Receive into a new tensor that is as long as the chunk that you then add (`torch.empty_like`), because the last
#   chunks may be shorter.
# - Do not change `tensor` or any of the `chunks`, which are views of it.
#
# <details><summary>Hint 1</summary>In the table, compare what is received in one row: how does the chunk change from
# rank to rank? Then go down one column: how does it change from step to step? On four ranks, chunk −2 is
# chunk 2.</details>
# <details><summary>Hint 2</summary>Three lines are enough: allocate a tensor like the chunk that you will
# add, call <code>ring_step</code>, and make <code>partial_sum</code> the sum of two tensors.</details>


# %% tags=["exercise", "export"] grade_id="ring-reduce-scatter"
# %%ranks
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
        ### BEGIN SOLUTION
        addend = chunks[(rank - step - 1) % world_size]
        received = torch.empty_like(addend)
        ring_step(partial_sum, received, group)
        partial_sum = received.add_(addend)
        ### END SOLUTION
    padding = chunks[0].numel() - partial_sum.numel()
    if padding or world_size == 1:  # a single rank must not return a view of tensor: pad() copies
        partial_sum = pad(partial_sum, (0, padding))
    return partial_sum


# %% [markdown]
# Try it on 0, 1, …, 7. On four ranks, the sum is 0, 4, …, 28, so rank 0 gets 0 and 4:

# %%
# %%ranks
print(ring_reduce_scatter(torch.arange(8.0, device=device)).tolist())

# %% tags=["check"] grade_id="check-ring-reduce-scatter" points=3
check.ring_reduce_scatter()

# %% [markdown]
# ## Exercise 1.3 · All-gather (7 min, 2 points)
#
# This is the second half of an all-reduce. Each rank has a shard, all of the same length, and every rank gets all of
# them, in rank order:
# ```python
# gathered = torch.cat([shard_of[r] for r in range(N)])
# ```
# `ring_all_gather` is given: it allocates the result, copies this rank's shard into it, and calls `gather_around`,
# which you write. You will use `gather_around` again in exercise 1.4.
#
# - `gather_around(chunks)` gets N chunks. Only this rank's own chunk contains data, and the function fills the others.
# - There are **N − 1** steps, and in each step a rank sends one chunk with `ring_step`, and receives another one.
# - In exercise 1.4, the last chunks may be shorter than the first, or empty. So receive into the chunks themselves.
#
# <details><summary>Hint</summary>In the first step, each rank sends its own chunk. Which chunk can it send in the
# second step?</details>


# %% tags=["exercise", "export"] grade_id="ring-all-gather"
# %%ranks
def gather_around(chunks: list[Tensor], group: ProcessGroup | None = None) -> None:
    """Fill chunks on every rank. chunks[r] starts at rank r and visits every other rank once."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    ### BEGIN SOLUTION
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
    gathered = shard.new_empty(dist.get_world_size(group), shard.numel())
    gathered[dist.get_rank(group)] = shard.flatten()
    gather_around(list(gathered), group)
    return gathered.view(-1)


# %% [markdown]
# Try it with two elements per rank. Every rank should print `[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]`:

# %%
# %%ranks
print(ring_all_gather(torch.full((2,), float(rank), device=device)).tolist())

# %% tags=["check"] grade_id="check-ring-all-gather" points=2
check.ring_all_gather()

# %% [markdown]
# ## Exercise 1.4 · All-reduce (7 min, 2 points)
#
# You have both halves. Replace `tensor`, in place, with its sum over the ranks:
# ```python
# total = sum(tensor_of[r] for r in range(N))
# for r in range(N):
#     tensor_of[r][...] = total
# ```
#
# The first and last lines are given. Two lines in between are enough.
#
# - `own_chunk` and the other chunks are views of the tensor, or of a copy if it is not contiguous. Write into their
#   memory: `own_chunk = …` would only bind the name to another tensor.
# - `ring_reduce_scatter` pads its result. Only the first `own_chunk.numel()` elements of it belong to `own_chunk`.
# - Each rank sends at most 2(N−1)·⌈numel/N⌉ elements, in 2(N−1) messages.
# - The results are bitwise equal on all ranks. Otherwise, the models on different ranks would drift apart.
#
# <details><summary>Hint</summary>Which of your functions fills the chunks that it is given? What does
# <code>own_chunk</code> have to contain before that?</details>


# %% tags=["exercise", "export"] grade_id="ring-all-reduce"
# %%ranks
@torch.no_grad()
def ring_all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Replace tensor, in place, by its sum over the group's N ranks. The results are bitwise equal on all ranks.

    Communication: 2(N−1) transfers, at most 2(N−1)·ceil(numel / N) elements sent per rank.
    Source: nccl-tests, PERFORMANCE.md.
    """
    contiguous = tensor.contiguous()
    chunks = chunks_of(contiguous, dist.get_world_size(group))
    own_chunk = chunks[dist.get_rank(group)]
    ### BEGIN SOLUTION
    own_chunk.copy_(ring_reduce_scatter(contiguous, group)[: own_chunk.numel()])
    gather_around(chunks, group)
    ### END SOLUTION
    if contiguous is not tensor:
        tensor.copy_(contiguous)


# %% [markdown]
# Try it on a tensor of five elements, which four ranks cannot share equally. Each element of the sum is 0 + 1 + 2 + 3:

# %%
# %%ranks
tensor = torch.full((5,), float(rank), device=device)
ring_all_reduce(tensor)
print(tensor.tolist())

# %% tags=["check"] grade_id="check-ring-all-reduce" points=2
check.ring_all_reduce()

# %% [markdown]
# ## Exercise 1.5 · Broadcast along a tree (14 min, 3 points)
#
# Replace `tensor`, in place, with the tensor of rank `src`. In lab 00, one rank sent it to all others, one after the
# other. Here, every rank that already has the tensor helps to send it on. With `src=0` and eight ranks, for example:
#
# | round | messages |
# |---|---|
# | 1 | 0 → 1 |
# | 2 | 0 → 2, 1 → 3 |
# | 3 | 0 → 4, 1 → 5, 2 → 6, 3 → 7 |
#
# To support any `src`, the ranks are numbered around the ring so that `src` has `index` 0. The numbers in the table are
# then indices. `rank_of` converts an index back to a rank within the group. Both are given, and so is the loop over the
# rounds: when a round begins, the ranks with the indices 0 to `holders` − 1 have the tensor. You write one round: a
# rank sends, receives, or does nothing.
#
# - Send with `dist.send(contiguous, group=group, group_dst=…)`, and receive with
#   `dist.recv(contiguous, group=group, group_src=…)`.
# - There are ⌈log₂ N⌉ rounds and N − 1 messages in total, for any N. If N is not a power of two, some ranks have nobody
#   to send to in the last round.
#
# <details><summary>Hint 1</summary>In round 3 of the table, <code>holders</code> is 4. What is the difference between
# the receiver's index and the sender's? And in rounds 1 and 2?</details>
# <details><summary>Hint 2</summary>There are two cases: <code>index</code> is smaller than <code>holders</code>, or at
# least <code>holders</code> but smaller than <code>2 * holders</code>. In the first case, does the receiver
# exist?</details>


# %% tags=["exercise", "export"] grade_id="tree-broadcast"
# %%ranks
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
        ### BEGIN SOLUTION
        if index < holders and index + holders < world_size:
            dist.send(contiguous, group=group, group_dst=rank_of(index + holders))
        elif holders <= index < 2 * holders:
            dist.recv(contiguous, group=group, group_src=rank_of(index - holders))
        ### END SOLUTION
        holders *= 2
    if contiguous is not tensor:
        tensor.copy_(contiguous)


# %% tags=["check"] grade_id="check-tree-broadcast" points=3
check.tree_broadcast()

# %% [markdown]
# ## Exercise 1.6 · Break it, then fix it (9 min, 2 points)
#
# You know a ring that hangs: in lesson 00, every rank received first. The next cell has a whole all-reduce of this
# kind.
#
# **Predict.** In which call will the doctor find rank 2, and which rank will it be waiting for? Would the ring still
# hang if rank 0 alone swapped its two calls?


# %% tags=["raises-exception"]
# %%ranks
def simpler_ring_all_reduce(tensor):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    outgoing, incoming = tensor.clone(), torch.empty_like(tensor)
    for _ in range(world_size - 1):
        dist.recv(incoming, src=left)
        dist.send(outgoing, dst=right)
        tensor += incoming
        outgoing.copy_(incoming)


simpler_ring_all_reduce(torch.ones(4, device=device))

# %% [markdown]
# Read the doctor's table: each rank waits in `recv` for the one before it, all around the ring. Swapping the two calls
# on every rank only reverses the circle. To test your second prediction, swap them on rank 0 alone, and run the cell
# again.
#
# `dist.send` and `dist.recv` each wait for the other side. You can build a ring step from these two alone, as long as
# the ranks do not all begin with the same one. We count the *turns* that this takes: in one turn, a rank can send one
# message or receive one, but not both.
#
# - Write `ring_step_in_turns`. It does what `ring_step` does, and all N messages are complete after **2 turns** if N is
#   even, and after 3 turns if N is odd.
# - Use only `dist.send` and `dist.recv`, with `group_dst` and `group_src` as in exercise 1.5. An odd N needs no code of
#   its own.
#
# <details><summary>Hint</summary>If rank 0 alone sends first, the circle is broken in one place, and nothing hangs. But
# in which turn does the last rank send its message then? In how many places can you break the circle?</details>


# %% tags=["exercise", "export"] grade_id="ring-step-in-turns"
# %%ranks
def ring_step_in_turns(
    outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None
) -> None:
    """Do what ring_step does with send and recv alone, each of which waits for the other side.

    Communication: one transfer of outgoing's bytes; 2 turns for an even number of ranks, 3 for an odd one.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    left, right = (rank - 1) % world_size, (rank + 1) % world_size
    ### BEGIN SOLUTION
    if rank % 2 == 0:
        dist.send(outgoing, group=group, group_dst=right)
    dist.recv(incoming, group=group, group_src=left)
    if rank % 2 == 1:
        dist.send(outgoing, group=group, group_dst=right)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-ring-step-in-turns" points=2
check.ring_step_in_turns()

# %% [markdown]
# ## Exercise 1.7 · Stretch: a reduce-scatter in one call (5 min, 1 point)
#
# You can skip this one: exercise 1.8 does not use it.
#
# In `dist.all_to_all_single(received, tensor)`, each rank sends one chunk of its tensor to every rank: chunk *r* goes
# to rank *r*. It also receives one chunk from each. Use this call to write a reduce-scatter.
#
# - The result is the same as that of `ring_reduce_scatter`.
# - Call `all_to_all_single` **once**. The padded tensor, `padded`, is given, and consists of N chunks of equal length.
# - The result has the dtype of `tensor`. By default, `sum()` of an int32 tensor returns int64, so pass
#   `dtype=tensor.dtype`.
#
# <details><summary>Hint</summary>Which chunks does rank r need for its sum, and from which ranks does it receive
# them?</details>


# %% tags=["exercise", "export"] grade_id="direct-reduce-scatter"
# %%ranks
@torch.no_grad()
def direct_reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Do what ring_reduce_scatter does, but send each chunk directly to its owner.

    Shape: tensor of any shape; returns [ceil(numel / N)].
    Communication: one all_to_all_single of the padded tensor; (N−1)·ceil(numel / N) elements sent per rank.
    """
    world_size = dist.get_world_size(group)
    flat, padding = tensor.contiguous().view(-1), -tensor.numel() % world_size
    padded = pad(flat, (0, padding)) if padding else flat
    ### BEGIN SOLUTION
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    return received.view(world_size, padded.numel() // world_size).sum(0, dtype=tensor.dtype)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-direct-reduce-scatter" points=1
check.direct_reduce_scatter()

# %% [markdown]
# ## Exercise 1.8 · Launch now, wait later (15 min, 2 points)
#
# So far, all your functions return only when their messages are complete. From chapter 04 on, communication runs while
# backward computes. For that, you need collectives that return a handle immediately.
#
# The class `InFlight` is given. It launches any number of point-to-point messages, and waits for them later. You will
# use it, so read it first:


# %% tags=["export"] module="async_collectives"
# %%ranks
"""Asynchronous collectives: launch one now, compute something else, and wait for it later.

A flat tensor consists of N shards of equal length, and shard r belongs to rank r of the group. Each function that
launches a collective returns a handle. Call the handle's wait() before you use the result.
"""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shared.c10d import all_gather_single, reduce_scatter_single


# %% tags=["export"] module="async_collectives"
# %%ranks
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
        operations = [
            dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer)
            for tensor, peer in receives
        ]
        operations += [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for tensor, peer in sends
        ]
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> None:
        """Wait until every transfer is complete."""
        for work in self.works:
            work.wait()


# %% [markdown]
# `DirectReduceScatter` is a reduce-scatter in flight. `shards[r]` is this rank's contribution to rank *r*'s sum. The
# first lines are given: `peers` lists the other ranks, `self.received` has one row of memory for each of them, and
# `receives` pairs each row with the rank that sends it.
#
# - Finish `__init__`: it launches all messages with `InFlight`, and does not wait for them. Each rank sends every other
#   rank one shard, and receives one from it.
# - Write `wait()`: it waits for all messages, adds the received shards to `self.own` in place, and returns `self.own`,
#   which is a view of the caller's tensor. Afterwards, the caller may overwrite the other shards.
#
# <details><summary>Hint</summary>Which pairs of a tensor and a rank does <code>InFlight</code> need for the sends? And
# what must <code>__init__</code> store for <code>wait()</code>?</details>


# %% tags=["exercise", "export"] grade_id="direct-reduce-scatter-in-flight" module="async_collectives"
# %%ranks
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
        ### BEGIN SOLUTION
        sends = [(shards[peer], peer) for peer in peers]
        self.in_flight = InFlight(sends, receives, group)
        ### END SOLUTION

    def wait(self) -> Tensor:
        """Wait until the sum is complete, and return this rank's shard of it."""
        ### BEGIN SOLUTION
        self.in_flight.wait()
        for shard in self.received:
            self.own += shard
        return self.own
        ### END SOLUTION


# %% [markdown]
# `launch_reduce_scatter` is given, and the check calls it. It uses your class, or the backend's own reduce-scatter on
# GPUs. Run the next cell, and then the check.


# %% tags=["export"] module="async_collectives"
# %%ranks
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


# %% tags=["check"] grade_id="check-launch-reduce-scatter" points=2
check.launch_reduce_scatter()

# %% [markdown]
# That was the last exercise. Run the next three cells without reading them, and go on to your own figures. They define
# what later labs need: `launch_all_gather`, a `reduce_scatter_` that works piece by piece to save memory, and
# `gather_shards` for checkpoints.


# %% tags=["export"] module="async_collectives"
# %%ranks
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
    return InFlight(
        [(shards[rank], peer) for peer in peers], [(shards[peer], peer) for peer in peers], group
    )


PIECE_NUMEL = 2**20  # how many elements, of all shards together, reduce_scatter_ launches at a time


# %% tags=["export"] module="async_collectives"
# %%ranks
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


# %% tags=["export"]
# %%ranks
def gather_shards(
    shard: Tensor, group: ProcessGroup | None = None, dst: int | None = None
) -> Tensor | None:
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


# %% [markdown]
# ## Your own figures (8 min)
#
# How many bytes does each rank send when four ranks sum tensors of 4 MB? In lesson 00, rank 0 received 12 MB and sent
# 12 MB. In lab 00, each rank passed on three whole tensors, which is 12 MB as well.
#
# **Predict.** How many MB does each rank send with your `ring_all_reduce`?

# %%
my_prediction_mb = None


# %%
# %%ranks
from shared import wire


def sent_by(collective, numel=1_000_000):
    """Return how many MB this rank sends to each rank, and in how many messages."""
    with wire.ledger() as log:
        collective(torch.ones(numel, device=device))
    return log.sent_mb_to(world_size), log.ops.get("send", 0)


sent_mb, messages = sent_by(ring_all_reduce)

# %%
sent_mb, messages = ranks.pull("sent_mb"), ranks.pull("messages")
print(f"{predicted(my_prediction_mb, '{} MB')}measured {[sum(row) for row in sent_mb]} MB")
print(f"in {messages} messages.")
plots.traffic(sent_mb)

# %% [markdown]
# That is half as many bytes as in lab 00, in twice as many messages. On 64 ranks, each rank would still send less than
# two tensors. With lab 00's ring, it would send 63.
#
# Next is a tree broadcast from rank 1. In its map, look for the rank that sends the most, and for ranks that send
# nothing.

# %%
# %%ranks
sent_mb, messages = sent_by(lambda tensor: tree_broadcast(tensor, src=1))

# %%
plots.traffic(ranks.pull("sent_mb"))

# %% [markdown]
# Now compare your all-reduce with torch's, behind the emulated link of the lesson, or with NCCL over your real links.
# How far apart are the two curves?

# %%
# %%ranks
from shared import measure

sizes_bytes = [4**power for power in range(5, 12)]
with measure.behind_link("1gbit", latency_ms=5):
    sums = measure.collectives(
        {"your ring": ring_all_reduce, "torch": dist.all_reduce}, sizes_bytes, rounds=10
    )

# %% tags=["nbval-ignore-output"]
sums = ranks.pull("sums")[0]
cost_plots.side_by_side({sums.where: sums.measured_s}, "bytes in the tensor")

# %% [markdown]
# The link's delays add up to the same time for both. But your ring is delayed in each step, and Python's work
# comes on top of each delay. If this work takes 0.3 ms per step, a small tensor takes 6 · 5.3 = 32 ms. Torch's
# all-reduce is delayed only once, as a whole, by 6 · 5 = 30 ms, and torch moves and adds up the bytes *during* that
# time.
#
# What about your reduce-scatter? As the lesson says, gloo's reduce-scatter is an all-reduce, which sends twice as much
# as a ring requires. Yours should send half as much. The network interface can tell: it counts the bytes of all ranks,
# and those of other programs on this machine. If the numbers look too large, run the next two cells again:


# %%
# %%ranks
def carried_mb(reduce_scatter, numel=4_000_000):
    """Return how many MB all ranks send together, or None where the system does not count them."""
    tensor = torch.zeros(numel, device=device)
    with wire.ledger() as log:
        dist.barrier()  # so that no rank sends before all ledgers are open
        reduce_scatter(tensor)
        dist.barrier()
    return None if log.carried_bytes is None else log.carried_bytes / 1e6


def torchs_reduce_scatter(tensor):
    reduce_scatter_single(tensor.new_empty(tensor.numel() // world_size), tensor)


calls = {"your ring": ring_reduce_scatter, "torch": torchs_reduce_scatter}
carried = {name: carried_mb(call) for name, call in calls.items()}

# %% tags=["nbval-ignore-output"]
carried = ranks.pull("carried")[0]
if None not in carried.values():
    display(plots.bars(carried, "MB that all ranks send to reduce-scatter 16 MB"))

# %% [markdown]
# A tensor of 16 MB needs 3/4 · 16 MB = 12 MB from each rank, which is 48 MB in total. With NCCL, the figure may show
# less, because this interface does not count NVLink.
#
# You can now say how many bytes each rank must send for the collectives of the following chapters. In chapter 02, you
# train with one of them.

# %%
ranks.stop()
