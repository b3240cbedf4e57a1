# ---
# jupyter:
#   course:
#     module: first_collectives
#     minutes: 60
# ---

# %% [markdown]
# # Lab 00 · First collectives
#
# **60 minutes, 15 points.** You write five small functions that run on every rank. One of them fixes a hang that you
# will meet again in your own training scripts.
#
# For each exercise, write the function where it says `your code here`, run its cell, and then run the check below it.
# Each run of a check draws new values and gives each rank only its own. It tries 1, 2, 3 and 4 ranks, and it counts
# what you send.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import first_collectives as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""First collectives: small functions that all ranks call together."""

import torch
import torch.distributed as dist
from torch import Tensor

# %% [markdown]
# ## Exercise 0.1 · A sum over ranks (5 min, 2 points)
#
# Each rank calls `sum_over_ranks` with its own value, and every rank gets the sum of all values. The result must equal:
# ```python
# total = 0.0
# for rank in range(world_size):
#     total += value_of[rank]
# ```
#
# Target: **one** all-reduce of 8 bytes, with the full precision of a Python float. A collective takes a tensor, and
# `tensor.item()` returns the value of a tensor with one element.


# %% tags=["exercise", "export"] grade_id="sum-over-ranks"
# %%ranks
def sum_over_ranks(value: float) -> float:
    """Add up one value per rank and return the sum on every rank.

    Communication: one all-reduce of 8 bytes.
    """
    ### BEGIN SOLUTION
    # A Python float has 16 significant digits, and float32, torch's default, only 7.
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
    ### END SOLUTION


# %% tags=["check"] grade_id="check-sum-over-ranks" points=2
check.sum_over_ranks()

# %% [markdown]
# ## Exercise 0.2 · A mean over unequal shares (10 min, 3 points)
#
# Each rank holds a tensor with a different number of values: nine, one, or even none. Return the mean of all values of
# all ranks:
# ```python
# everything = []
# for rank in range(world_size):
#     everything += values_of[rank].tolist()
# mean = sum(everything) / len(everything)
# ```
#
# Target: **one** all-reduce of 16 bytes. You may assume that at least one rank holds a value.
#
# <details><summary>Hint</summary>Suppose that one rank holds (1, 2, 3) and another holds (10). Their means are 2 and
# 10, and the mean of these means is 6. But the right answer is 4. Which two numbers must each rank
# contribute?</details>


# %% tags=["exercise", "export"] grade_id="global-mean"
# %%ranks
def global_mean(values: Tensor) -> float:
    """Average all values of all ranks, so that each value has the same weight.

    Args:
        values: This rank's values, of any length. It may be empty.

    Communication: one all-reduce of 16 bytes.
    """
    ### BEGIN SOLUTION
    sum_and_count = torch.tensor(
        [values.sum(dtype=torch.float64), values.numel()], dtype=torch.float64, device=values.device
    )
    dist.all_reduce(sum_and_count)
    total, count = sum_and_count.tolist()
    return total / count
    ### END SOLUTION


# %% tags=["check"] grade_id="check-global-mean" points=3
check.global_mean()

# %% [markdown]
# ## Exercise 0.3 · Pass to the right (15 min, 4 points)
#
# Every rank sends its tensor to its right neighbor, and returns the tensor that it receives from its left neighbor. The
# right neighbor of the last rank is rank 0.
# ```python
# for rank in range(world_size):
#     result_of[(rank + 1) % world_size] = tensor_of[rank]
# ```
#
# Target: each rank sends **one** message and receives **one**, for 1 element as well as for a million. The argument
# does not change. If there is only one rank, it is its own neighbor.
#
# <details><summary>Hint</summary>The ring in the lesson hung because every rank waited for a message before any rank
# had sent one. Either let some ranks send first, or launch both operations before you wait for either: look up
# <code>dist.isend</code>, <code>dist.irecv</code> and <code>dist.batch_isend_irecv</code>, and what their
# <code>wait()</code> guarantees.</details>


# %% tags=["exercise", "export"] grade_id="pass-right"
# %%ranks
def pass_right(tensor: Tensor) -> Tensor:
    """Send the tensor to the right neighbor and return the tensor of the left neighbor.

    Communication: each rank sends and receives one message of the tensor's size.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()  # a rank cannot send to itself
    received = torch.empty_like(tensor)
    # Launch both operations before waiting for either: if every rank first waited to receive, no rank would ever send.
    send = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    receive = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    for handle in dist.batch_isend_irecv([send, receive]):
        handle.wait()
    return received
    ### END SOLUTION


# %% tags=["check"] grade_id="check-pass-right" points=4
check.pass_right()

# %% [markdown]
# gloo runs every transfer that you have launched at the same time. NCCL runs those of a rank one after the other, even
# if `isend` and `irecv` launched them: when every rank sends first, no rank gets as far as its receive. So **with NCCL,
# batch the sends and receives, or let the ranks take turns**. `dist.batch_isend_irecv` hands a batch over as a whole.
# You can try this without a GPU: `ranks.start(4, backend="gloo:cpu", simulate="nccl")` lets gloo behave like NCCL.

# %% [markdown]
# ## Exercise 0.4 · Break it, then fix it (10 min, 3 points)
#
# Many training scripts contain a function like this one, with which rank 0 logs the mean loss. Run the cell. Before you
# read on, look at the doctor's table: which rank is waiting, which ranks is it waiting for, and why do they never call
# the collective?


# %% tags=["raises-exception"]
# %%ranks
def log_loss(loss):
    if rank == 0:
        dist.all_reduce(loss)
        print(f"mean loss {loss.item() / world_size:.3f}")


log_loss(torch.tensor(2.0 + rank, device=device))

# %% [markdown]
# The function also has a second bug, which raises no error: what would `loss` hold afterwards?
#
# Write a correct version. Rank 0 gets the mean as a float, and the other ranks get `None`. `loss` must not change, so
# that you can still call `backward()` on it. Target: **one** all-reduce, of the size of the loss or of 8 bytes.


# %% tags=["exercise", "export"] grade_id="log-mean-loss"
# %%ranks
def log_mean_loss(loss: Tensor) -> float | None:
    """Average the losses of all ranks, for rank 0 to log.

    Args:
        loss: This rank's loss, a scalar. It does not change.

    Returns:
        The mean loss on rank 0, and None on the other ranks.

    Communication: one all-reduce of the size of the loss.
    """
    ### BEGIN SOLUTION
    mean = loss.detach().clone()  # all_reduce works in place, and backward() still needs the loss
    dist.all_reduce(mean)  # every rank must call it, or rank 0 would wait forever
    mean /= dist.get_world_size()
    return mean.item() if dist.get_rank() == 0 else None
    ### END SOLUTION


# %% tags=["check"] grade_id="check-log-mean-loss" points=3
check.log_mean_loss()

# %% [markdown]
# ## Exercise 0.5 · Stretch: a broadcast by hand (10 min, 3 points)
#
# `broadcast_by_hand(tensor, src)` copies the values of rank `src` into the `tensor` of every rank, in place. Use only
# `dist.send` and `dist.recv`.
# ```python
# for rank in range(world_size):
#     tensor_of[rank][:] = tensor_of[src]
# ```
#
# Target: **N − 1** messages in total, for any `src`. Rank `src` may send them one after another. Faster schedules are
# welcome; they need the same number of messages.


# %% tags=["exercise", "export"] grade_id="broadcast-by-hand"
# %%ranks
def broadcast_by_hand(tensor: Tensor, src: int) -> None:
    """Overwrite the tensor, in place, with the tensor of rank src.

    Communication: world_size − 1 messages of the tensor's size, over all ranks.
    """
    ### BEGIN SOLUTION
    if dist.get_rank() != src:
        dist.recv(tensor, src=src)
        return
    for dst in range(dist.get_world_size()):
        if dst != src:
            dist.send(tensor, dst=dst)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-broadcast-by-hand" points=3
check.broadcast_by_hand()

# %% [markdown]
# ## Your own figures
#
# Your `pass_right` is enough to build an all-reduce: pass each tensor around the ring once, and add every tensor that
# arrives. Does the result agree with `dist.all_reduce`?


# %%
# %%ranks
def ring_sum(tensor):
    """Sum a tensor over the ranks by passing full tensors around the ring. Returns a new tensor."""
    total, received = tensor.clone(), tensor
    for _ in range(world_size - 1):
        received = pass_right(received)
        total += received
    return total


tensor = torch.arange(1000.0, device=device) * rank
expected = tensor.clone()
dist.all_reduce(expected)
print("equal:", torch.equal(ring_sum(tensor), expected))

# %% [markdown]
# How many bytes does each rank send to each other rank when you sum tensors of 4 MB? In the lesson's map, the row and
# the column of rank 0 were full. **Predict** this map.

# %%
# %%ranks
from shared import wire

with wire.ledger() as log:
    ring_sum(torch.ones(1_000_000, device=device))
sent_mb = [0.0] * world_size
for entry in log.entries:
    if entry.op == "send":
        sent_mb[entry.partner] += entry.payload_bytes / 1e6

# %%
plots.traffic(ranks.pull("sent_mb"))

# %% [markdown]
# No rank has a special role any more. To see the map of your own broadcast, call
# `broadcast_by_hand(torch.ones(1_000_000, device=device), src=1)` in the cell above instead.

# %% [markdown]
# How long does it take, compared with `dist.all_reduce`? In the default group, the ranks check before each all-reduce
# that they all called the same operation, which takes time. In a new group, they skip this check:

# %%
# %%ranks
unchecked_group = dist.new_group()


def torch_sum(tensor):
    dist.all_reduce(tensor, group=unchecked_group)


# %%
# %%ranks
import time


def fastest_ms(collective, elements, rounds=15):
    """Time collective(tensor), started on all ranks at once. Returns the time of the fastest round."""
    tensor = torch.zeros(elements, device=device)
    collective(tensor)
    times_s = []
    for _ in range(rounds):
        dist.barrier(unchecked_group)
        began_s = time.perf_counter()
        collective(tensor)
        tensor[0].item()
        times_s.append(time.perf_counter() - began_s)
    return 1000 * min(times_s)


# %%
# %%ranks
sizes = [10**power for power in range(7)]
by_hand_ms = [fastest_ms(ring_sum, size) for size in sizes]
torch_ms = [fastest_ms(torch_sum, size) for size in sizes]

# %% tags=["nbval-ignore-output"]
sizes_bytes = [4 * size for size in ranks.pull("sizes")[0]]
# Each time is that of the slowest rank.
by_hand = [max(times) for times in zip(*ranks.pull("by_hand_ms"), strict=True)]
by_torch = [max(times) for times in zip(*ranks.pull("torch_ms"), strict=True)]
print(f"4 MB: {by_hand[-1]:.1f} ms by hand, {by_torch[-1]:.1f} ms with dist.all_reduce")
plots.message_cost(sizes_bytes, {"by hand": by_hand, "torch": by_torch})

# %% [markdown]
# In your ring, each rank sends three full tensors: 12 MB to sum tensors of 4 MB. How few bytes are enough to leave the
# sum on every rank? Chapter 01 starts with this question.

# %%
ranks.stop()
