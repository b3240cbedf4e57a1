# ---
# jupyter:
#   course:
#     module: collectives
#     minutes: 75
# ---

# %% [markdown]
# # Lab 01 · Collectives by hand
#
# **75 minutes, 16 points.** You build what `dist.all_reduce` does from messages between pairs of ranks: a
# reduce-scatter and an all-gather on a ring. Then you build a broadcast along a tree, and a reduce-scatter that you
# launch now and wait for later. Later chapters use these functions to shard gradients, optimizer states and parameters.
#
# Each exercise has a check. It draws new data every time and gives each rank only its own. It begins with tensors whose
# length is a multiple of N, the number of ranks. Once these are right, it tries other lengths, dtypes, and subgroups of
# the ranks, and counts the bytes that each rank sends. So start with the plain case, run the check, and continue from
# what it reports.
#
# - `group` is the process group that communicates, and `None` means all ranks. Your functions only have to pass it on
#   to each call of `dist`.
# - You may support tensors that are not contiguous, or reject them with a `ValueError` before you send anything.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import collectives as check
from shared.plots import costs as cost_plots

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
# ## Exercise 1.1 · One step around the ring (5 min, 1 point)
#
# In each step of the ring, a rank sends `outgoing` to its right neighbor, and receives its left neighbor's tensor into
# `incoming`:
# ```python
# for r in range(N):
#     incoming_of[(r + 1) % N][:] = outgoing_of[r]
# ```
# This is `pass_right` from lab 00, with two differences: the caller provides the tensor to receive into, and the ranks
# are those of a group.
#
# - Each rank sends one message and receives one.
# - When the function returns, both are complete.
# - You can assume that there are at least two ranks.
#
# <details><summary>Hint</summary><code>dist.P2POp(dist.isend, tensor, group=group, group_peer=…)</code> describes a
# send, and with <code>dist.irecv</code> a receive; <code>group_peer</code> is a rank within the group, like
# <code>dist.get_rank(group)</code>. <code>dist.batch_isend_irecv</code> launches a list of sends and receives together,
# and returns at once with a list of handles. How do you know that the operation of a handle is complete?</details>


# %% tags=["exercise", "export"] grade_id="ring-step"
# %%ranks
def ring_step(outgoing: Tensor, incoming: Tensor, group: ProcessGroup | None = None) -> None:
    """Send outgoing to the right neighbor, and receive the left neighbor's outgoing into incoming.

    Communication: one transfer of outgoing's bytes.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
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
# ## Exercise 1.2 · Reduce-scatter (12 min, 3 points)
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
# Each partial sum is passed once around the ring, to the right, and every rank adds its own chunk to it. All N partial
# sums are passed on at the same time, one from each rank. In outline:
#
#     partial_sum = one of my chunks                      (which one?)
#     N − 1 times:
#         send partial_sum to the right, receive another one from the left
#         partial_sum = what I received + my own chunk of the same index
#
# - There are **N − 1** steps, and in each step a rank sends **one chunk**: (N−1)/N of the tensor's bytes in total.
# - Do not change the argument, and do not copy it as a whole. Memory for two chunks is enough.
# - Every rank returns ⌈numel/N⌉ elements. A shorter chunk is padded with zeros at the end.
# - The result has its own memory, even with a single rank.
#
# <details><summary>Hint 1</summary>Start from the end. After the last step, rank r must hold chunk r. Which chunk did
# it receive in the last step, then? Which one did its left neighbor send in that step, and receive in the step before?
# Follow it back to the first step.</details>
# <details><summary>Hint 2</summary>On four ranks, the sum of chunk 0 must arrive on rank 0 in step 3. It comes from
# rank 3, which gets it from rank 2 in step 2, which gets it from rank 1 in step 1. So rank 1 begins with chunk 0. With
# which chunk does rank r begin?</details>


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
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    chunks = chunks_of(tensor.contiguous(), world_size)
    buffers = torch.empty_like(chunks[0]), torch.empty_like(chunks[0])
    partial_sum = chunks[(rank - 1) % world_size]
    for step in range(1, world_size):
        own_chunk = chunks[(rank - step - 1) % world_size]
        # The two buffers alternate, so that nothing is received into the one that is being sent.
        received = buffers[step % 2][: own_chunk.numel()]
        ring_step(partial_sum, received, group)
        partial_sum = received.add_(own_chunk)
    padding = chunks[0].numel() - partial_sum.numel()
    if padding or world_size == 1:  # a single rank must not return a view of tensor: pad() copies
        partial_sum = pad(partial_sum, (0, padding))
    return partial_sum
    ### END SOLUTION


# %% [markdown]
# Try it on 0, 1, …, 7. On four ranks, the sum is 0, 4, …, 28, so rank 0 gets 0 and 4:

# %%
# %%ranks
print(ring_reduce_scatter(torch.arange(8.0, device=device)).tolist())

# %% tags=["check"] grade_id="check-ring-reduce-scatter" points=3
check.ring_reduce_scatter()

# %% [markdown]
# ## Exercise 1.3 · All-gather (8 min, 2 points)
#
# This is the second half of an all-reduce. Each rank has a shard, all of the same length, and every rank gets all of
# them, in rank order:
# ```python
# gathered = torch.cat([shard_of[r] for r in range(N)])
# ```
# Write it as two functions, because you need the first one again in exercise 1.4:
#
# - `gather_around(chunks)` communicates. It gets N chunks. Only this rank's own chunk contains data, and the function
#   fills the others.
# - `ring_all_gather(shard)` allocates the result, copies its own shard into it, and lets `gather_around` fill the rest.
# - There are **N − 1** steps, and in each step a rank sends one shard.
# - Receive each shard directly into the result, and send it on from there, so that no other copy is needed.
#
# <details><summary>Hint</summary>In the first step, each rank sends its own chunk. Which chunk can it send in the
# second step?</details>


# %% tags=["exercise", "export"] grade_id="ring-all-gather"
# %%ranks
def gather_around(chunks: list[Tensor], group: ProcessGroup | None = None) -> None:
    """Fill chunks on every rank. chunks[r] starts at rank r and is passed once around the ring."""
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
# You have both halves. Replace `tensor`, in place, with its sum over the ranks:
# ```python
# total = sum(tensor_of[r] for r in range(N))
# for r in range(N):
#     tensor_of[r][...] = total
# ```
#
# - The tensor may have any shape. It may be empty, or have fewer elements than there are ranks.
# - Each rank sends at most 2(N−1)·⌈numel/N⌉ elements, in 2(N−1) messages.
# - The results are bitwise equal on all ranks. Otherwise, the models on different ranks would drift apart.
#
# <details><summary>Hint</summary>The tensor itself has memory for all N chunks. Which of your functions fills the
# chunks that it is given? And what does chunk r of the tensor have to contain before that, on rank r?</details>


# %% tags=["exercise", "export"] grade_id="ring-all-reduce"
# %%ranks
@torch.no_grad()
def ring_all_reduce(tensor: Tensor, group: ProcessGroup | None = None) -> None:
    """Replace tensor, in place, by its sum over the group's N ranks. The results are bitwise equal on all ranks.

    Communication: 2(N−1) transfers, at most 2(N−1)·ceil(numel / N) elements sent per rank.
    Source: nccl-tests, PERFORMANCE.md.
    """
    ### BEGIN SOLUTION
    contiguous = tensor.contiguous()
    chunks = chunks_of(contiguous, dist.get_world_size(group))
    own_chunk = chunks[dist.get_rank(group)]
    own_chunk.copy_(ring_reduce_scatter(contiguous, group)[: own_chunk.numel()])
    gather_around(chunks, group)
    if contiguous is not tensor:
        tensor.copy_(contiguous)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-ring-all-reduce" points=2
check.ring_all_reduce()

# %% [markdown]
# ## Exercise 1.5 · Broadcast along a tree (12 min, 3 points)
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
# - There are ⌈log₂ N⌉ rounds and N − 1 messages in total, and each rank receives at most once.
# - Your function works for any N and any `src`. (Other trees with the same number of rounds are fine, too.)
# - As in `dist.broadcast`, `src` is a *global* rank, also in a group. `dist.get_group_rank(group, src)` returns its
#   rank within the group. It does not accept `None`: the group of all ranks is `dist.group.WORLD`.
# - `dist.send(tensor, group=group, group_dst=…)` and `dist.recv(tensor, group=group, group_src=…)` take ranks within
#   the group. Plain `dst` and `src` are global ranks.
#
# Write it for `src=0` first, and then for any `src`.
#
# <details><summary>Hint 1</summary>When round k begins, which ranks have the tensor? Which ranks get it in round k, and
# from which ranks? Do all of them exist?</details>
# <details><summary>Hint 2</summary>For any <code>src</code>, number the ranks around the ring so that <code>src</code>
# has index 0. Compute with these indices only, and convert an index to a rank where you send or receive.</details>


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
    contiguous = tensor.contiguous()
    holders = 1  # how many ranks have the tensor: those with the smallest indices
    while holders < world_size:
        if index < holders and index + holders < world_size:
            dist.send(contiguous, group=group, group_dst=(index + holders + root) % world_size)
        elif holders <= index < 2 * holders:
            dist.recv(contiguous, group=group, group_src=(index - holders + root) % world_size)
        holders *= 2
    if contiguous is not tensor:
        tensor.copy_(contiguous)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-tree-broadcast" points=3
check.tree_broadcast()

# %% [markdown]
# ## Exercise 1.6 · Break it, then fix it (8 min, 2 points)
#
# The next cell has a simpler ring all-reduce, with plain sends and receives. **Predict.** In which call will the doctor
# find rank 2, and which rank will it be waiting for? If this ring ran, how many times as many bytes would it send as
# your `ring_all_reduce`? (1 would mean as many.)


# %% tags=["raises-exception"]
# %%ranks
def simpler_ring_all_reduce(tensor):
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    outgoing, incoming = tensor.clone(), torch.empty_like(tensor)
    for _ in range(world_size - 1):
        dist.send(outgoing, dst=right)
        dist.recv(incoming, src=left)
        tensor += incoming
        outgoing.copy_(incoming)


simpler_ring_all_reduce(torch.ones(4, device=device))

# %% [markdown]
# Read the doctor's table: each rank waits for the next one, all around the ring. (If this ring ran, each rank would
# send N − 1 whole tensors, which is N/2 times as many bytes as yours sends.)
#
# `dist.send` and `dist.recv` each wait for the other side. You can build a ring step from these two alone, as long as
# not all ranks begin with the same one. Here, a *turn* is a period in which every rank takes part in at most one
# message.
#
# - Write the step so that all N messages are complete after **2 turns** if N is even, and after 3 turns if N is odd.
# - Use only `dist.send` and `dist.recv`.
#
# <details><summary>Hint</summary>If rank 0 sends first and all other ranks receive first, nothing hangs, because the
# ring of waiting ranks is broken in one place. But in which turn does the last rank send its message then? In how many
# places can you break the ring?</details>


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
# ## Exercise 1.7 · Stretch: a reduce-scatter in one call (5 min, 1 point)
#
# With `dist.all_to_all_single(received, tensor)`, each rank sends one chunk of a tensor to every rank, and receives one
# chunk from each. Use it to write a reduce-scatter.
#
# - The result is the same as that of `ring_reduce_scatter`.
# - Make **one** call, with at most N·⌈numel/N⌉ elements.
#
# <details><summary>Hint</summary>Which chunks does rank r need for its sum, and from which ranks? Pad the tensor, so
# that all chunks have the same length.</details>


# %% tags=["exercise", "export"] grade_id="direct-reduce-scatter"
# %%ranks
@torch.no_grad()
def direct_reduce_scatter(tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Do what ring_reduce_scatter does, but send each chunk directly to its owner.

    Shape: tensor of any shape; returns [ceil(numel / N)].
    Communication: one all_to_all_single of the padded tensor; (N−1)·ceil(numel / N) elements sent per rank.
    """
    ### BEGIN SOLUTION
    world_size = dist.get_world_size(group)
    flat, padding = tensor.contiguous().view(-1), -tensor.numel() % world_size
    padded = pad(flat, (0, padding)) if padding else flat
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    return received.view(world_size, padded.numel() // world_size).sum(0, dtype=tensor.dtype)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-direct-reduce-scatter" points=1
check.direct_reduce_scatter()

# %% [markdown]
# ## Exercise 1.8 · Launch now, wait later (15 min, 2 points)
#
# So far, all your functions return when their messages are complete. From chapter 04 on, communication runs while
# backward computes. For that, you need collectives that return a handle at once.
#
# Three pieces are given. Read them first:
#
# - `InFlight` launches any number of point-to-point messages, and waits for them later.
# - `exchanges_directly` decides whether to use such messages or the backend's own collective.
# - `launch_all_gather` uses both. You can use it as a model for the class that you will write.


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


def exchanges_directly(tensor: Tensor, group: ProcessGroup | None = None) -> bool:
    """Tell whether to exchange shards by point-to-point transfers instead of the backend's own collective.

    Inside gloo, a reduce-scatter is an all-reduce, and an all-gather makes an extra copy. So on gloo we send every
    shard directly to its rank. But gloo cannot send from a GPU. There, and on NCCL, the backend's own collective runs.
    """
    return dist.get_backend(group) == "gloo" and not tensor.is_cuda


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


# %% [markdown]
# Write `DirectReduceScatter`, a reduce-scatter in flight:
#
# - `DirectReduceScatter(shards, group)` gets one tensor for each rank of the group: `shards[r]` is what this rank
#   contributes to rank r's sum. It launches all messages and returns without waiting for any of them.
# - `wait()` waits for the messages, adds what was received to this rank's own shard in place, and returns that shard.
# - A caller may have several reduce-scatters in flight, and wait for them in any order.
# - Each rank sends (N−1)/N of the bytes of `shards`.
# - Besides `shards`, it allocates memory only for what it receives, which is (N−1)/N of those bytes.
#
# <details><summary>Hint 1</summary>Which ranks send something to this one, and how many shards does it receive? Each
# shard needs its own memory until <code>wait()</code>.</details>
# <details><summary>Hint 2</summary><code>InFlight</code> does the launching. Which pairs of a tensor and a rank does it
# need for the sends, and which for the receives?</details>


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
        ### BEGIN SOLUTION
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        peers = [peer for peer in range(world_size) if peer != rank]
        self.own = shards[rank]  # wait() turns it into the sum
        self.received = self.own.new_empty(len(peers), self.own.numel())
        receives = list(zip(self.received, peers, strict=True))
        self.in_flight = InFlight([(shards[peer], peer) for peer in peers], receives, group)
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
# `launch_reduce_scatter` is given. It uses your class, or the backend's own reduce-scatter where that is better. The
# check calls `launch_reduce_scatter`.


# %% tags=["export"] module="async_collectives"
# %%ranks
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
# That was the last exercise. Two more functions for later labs are given. `reduce_scatter_` returns only when the sum
# is complete, but it cuts a large tensor into pieces and has at most two of them in flight, so that it needs little
# memory for what it receives. `gather_shards` concatenates the shards of all ranks, on one rank or on all of them, for
# checkpoints.


# %% tags=["export"] module="async_collectives"
# %%ranks
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
# ## Your own figures (4 min)
#
# Do your collectives agree with torch's? The tensors contain integers, so the results must be exactly equal.


# %%
# %%ranks
tensor = torch.arange(10_000, device=device) * (rank + 1)

expected = tensor.clone()
dist.all_reduce(expected)
actual = tensor.clone()
ring_all_reduce(actual)
print("all-reduce equal:", torch.equal(actual, expected))

shard = ring_reduce_scatter(tensor)
print("reduce-scatter equal:", torch.equal(shard, expected.view(world_size, -1)[rank]))
print("all-gather equal:", torch.equal(ring_all_gather(shard), expected))

tree_broadcast(actual.zero_() if rank != 2 else actual, src=2)
print("broadcast equal:", torch.equal(actual, expected))

# %% [markdown]
# How many bytes does each rank send when four ranks sum tensors of 4 MB? In lesson 00, rank 0 received 12 MB and sent
# 12 MB. In lab 00, each rank passed on three whole tensors, which is 12 MB as well.
#
# **Predict.** How many MB does each rank send with your `ring_all_reduce`?

# %%
my_prediction_mb = 0.0


# %%
# %%ranks
from shared import wire


def sent_by(collective, numel=1_000_000):
    """Return how many MB this rank sends to each rank, and in how many messages."""
    with wire.ledger() as log:
        collective(torch.ones(numel, device=device))
    sends = [entry for entry in log.entries if entry.op == "send"]
    sent_mb = [0.0] * world_size
    for send in sends:
        sent_mb[send.partner] += send.payload_bytes / 1e6
    return sent_mb, len(sends)


sent_mb, messages = sent_by(ring_all_reduce)

# %%
sent_mb, messages = ranks.pull("sent_mb"), ranks.pull("messages")
print(f"You predicted {my_prediction_mb:g} MB. The ranks sent {[sum(row) for row in sent_mb]} MB")
print(f"in {messages} messages.")
plots.traffic(sent_mb)

# %% [markdown]
# That is half as many bytes as in lab 00, in twice as many messages. On 64 ranks, a rank would still send less than two
# tensors. With lab 00's ring, it would send 63.
#
# Next is a tree broadcast from rank 1. Before you run it, sketch the map: which rank sends the most, and which ranks
# send nothing?

# %%
# %%ranks
sent_mb, messages = sent_by(lambda tensor: tree_broadcast(tensor, src=1))

# %%
plots.traffic(ranks.pull("sent_mb"))

# %% [markdown]
# Now compare your all-reduce with torch's, behind the emulated link of the lesson. (With NCCL, the ranks use their real
# links.) How far apart are the two curves?

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
# Both rings take the same number of steps and send the same bytes, so the link gives them the same time. What remains
# is the time that Python takes: torch's ring runs in C++.
#
# And your reduce-scatter? As you saw in the lesson, gloo's reduce-scatter is an all-reduce, which sends twice as much
# as a ring requires. The emulated link would hide that, because it delays torch's function as if gloo sent only what a
# ring requires. So this time, we measure without the link. Compare the curves at the right end:


# %%
# %%ranks
def torchs_reduce_scatter(tensor):
    reduce_scatter_single(tensor.new_empty(tensor.numel() // world_size), tensor)


calls = {"your ring": ring_reduce_scatter, "all to all": direct_reduce_scatter}
calls["torch"] = torchs_reduce_scatter
scattered = measure.collectives(calls, sizes_bytes, rounds=10)

# %% tags=["nbval-ignore-output"]
scattered = ranks.pull("scattered")[0]
cost_plots.side_by_side({scattered.where: scattered.measured_s}, "bytes in the tensor")

# %% [markdown]
# The ring and the all-to-all send equally many bytes. Which of them is faster for small tensors, and which for large
# ones? Libraries make such choices by size, too: NCCL chooses between rings, trees and other algorithms.
#
# You can now say how many bytes each rank must send for the collectives of the following chapters. In chapter 02, you
# train with one of them.

# %%
ranks.stop()
