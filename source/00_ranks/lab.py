# ---
# jupyter:
#   course:
#     module: first_collectives
#     minutes: 60
# ---

# %% [markdown]
# # Lab 00 · First collectives
#
# **60 minutes, 15 points.** You write five small functions that run on every rank. One of them mends a hang that you
# will meet again in your own training scripts.
#
# For each exercise: write the function where it says `your code here`, run its cell, then run the check below it. A
# check draws fresh numbers each time, hands every rank only its own, tries 1, 2, 3 and 4 ranks, and counts what you
# send.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import first_collectives as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""First collectives: functions that all ranks call together."""

import torch
import torch.distributed as dist
from torch import Tensor

# %% [markdown]
# ## Exercise 0.1 · A sum over ranks (5 min, 2 points)
#
# Each rank calls `sum_over_ranks` with a number of its own. Each gets the sum of all of them. It must equal:
# ```python
# total = 0.0
# for rank in range(world_size):
#     total += value_of[rank]
# ```
#
# Target: **one** message of 8 bytes, and every digit right. A collective takes a tensor; `tensor.item()` takes the
# number back out.


# %% tags=["exercise", "export"] grade_id="sum-over-ranks"
# %%ranks
def sum_over_ranks(value: float) -> float:
    """Add up one number per rank; every rank gets the sum.

    Comm: one all_reduce of 8 bytes.
    """
    ### BEGIN SOLUTION
    # torch's default, float32, would keep 7 digits.
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item()
    ### END SOLUTION


# %% tags=["check"] grade_id="check-sum-over-ranks" points=2
check.sum_over_ranks()

# %% [markdown]
# ## Exercise 0.2 · A mean over unequal shares (10 min, 3 points)
#
# Rank *r* holds a tensor of some values: perhaps nine of them, perhaps one, perhaps none. Give back the mean of all
# values on all ranks:
# ```python
# everything = []
# for rank in range(world_size):
#     everything += values_of[rank].tolist()
# mean = sum(everything) / len(everything)
# ```
#
# Target: **one** message of 16 bytes. Some rank holds a value.
#
# <details><summary>Hint</summary>Ranks hold (1, 2, 3) and (10). The means are 2 and 10, and their mean is 6. The
# right answer is 4. Which two numbers does a rank have to tell the others?</details>


# %% tags=["exercise", "export"] grade_id="global-mean"
# %%ranks
def global_mean(values: Tensor) -> float:
    """Average the values of all ranks; each value counts once.

    Shapes: values: [any number, 0 too]
    Comm: one all_reduce of 16 bytes.
    """
    ### BEGIN SOLUTION
    mine = [values.sum(dtype=torch.float64), values.numel()]
    sum_and_count = torch.tensor(mine, dtype=torch.float64, device=values.device)
    dist.all_reduce(sum_and_count)
    total, count = sum_and_count.tolist()
    return total / count
    ### END SOLUTION


# %% tags=["check"] grade_id="check-global-mean" points=3
check.global_mean()

# %% [markdown]
# ## Exercise 0.3 · Pass to the right (15 min, 4 points)
#
# Every rank hands its tensor to its right neighbour, and gives back the one that came from the left. The last rank's
# right neighbour is rank 0.
# ```python
# for rank in range(world_size):
#     result_of[(rank + 1) % world_size] = tensor_of[rank]
# ```
#
# Target: each rank sends **one** message and receives **one**, for 1 element as for a million. The argument is as
# before. A rank alone is its own neighbour.
#
# <details><summary>Hint</summary>The lesson's circle hung because everybody waited before anybody had begun. Either
# some ranks begin with the other half, or nobody waits at once: look up <code>dist.isend</code>,
# <code>dist.irecv</code> and <code>dist.batch_isend_irecv</code>, and what their <code>wait()</code>
# promises.</details>


# %% tags=["exercise", "export"] grade_id="pass-right"
# %%ranks
def pass_right(tensor: Tensor) -> Tensor:
    """Send tensor to the right neighbour; give back the left neighbour's.

    Comm: one message out and one in, each of tensor's bytes.
    """
    ### BEGIN SOLUTION
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor.clone()  # a rank may not send to itself
    received = torch.empty_like(tensor)
    # Both are launched before either is waited for: nobody waits in a circle.
    to_right = dist.P2POp(dist.isend, tensor, (rank + 1) % world_size)
    from_left = dist.P2POp(dist.irecv, received, (rank - 1) % world_size)
    for handle in dist.batch_isend_irecv([to_right, from_left]):
        handle.wait()
    return received
    ### END SOLUTION


# %% tags=["check"] grade_id="check-pass-right" points=4
check.pass_right()

# %% [markdown]
# ## Exercise 0.4 · Break it, then mend it (10 min, 3 points)
#
# This function, or one like it, is in many training scripts. Rank 0 logs the mean loss. Run the cell. Before you read
# on, use the doctor's table: which rank waits, for whom, and why do they not come?


# %% tags=["raises-exception"]
# %%ranks
def log_loss(loss):
    if rank == 0:
        dist.all_reduce(loss)
        print(f"mean loss {loss.item() / world_size:.3f}")


log_loss(torch.tensor(2.0 + rank, device=device))

# %% [markdown]
# There is a second bug in it, and that one is silent: what does `loss` hold afterwards?
#
# Write it right. Rank 0 gets the mean as a float, the others `None`; `loss` stays what it was, ready for
# `backward()`. Target: **one** message, of the loss's own size or 8 bytes.


# %% tags=["exercise", "export"] grade_id="log-mean-loss"
# %%ranks
def log_mean_loss(loss: Tensor) -> float | None:
    """Average the ranks' losses for rank 0 to log; the others get None.

    Shapes: loss: []
    Comm: one all_reduce of loss's bytes.
    """
    ### BEGIN SOLUTION
    mean = loss.detach().clone()  # all_reduce works in place; loss is wanted
    dist.all_reduce(mean)  # on every rank, or rank 0 would wait for ever
    mean /= dist.get_world_size()
    return mean.item() if dist.get_rank() == 0 else None
    ### END SOLUTION


# %% tags=["check"] grade_id="check-log-mean-loss" points=3
check.log_mean_loss()

# %% [markdown]
# ## Exercise 0.5 · Stretch: a broadcast by hand (10 min, 3 points)
#
# After `broadcast_by_hand(tensor, src)` every rank's `tensor` holds what rank `src` held, in place. Use `send` and
# `recv` only.
# ```python
# for rank in range(world_size):
#     tensor_of[rank][:] = tensor_of[src]
# ```
#
# Target: **N − 1** messages over all ranks, for any `src`. Faster ways than one after the other are welcome: they
# cost as many messages.


# %% tags=["exercise", "export"] grade_id="broadcast-by-hand"
# %%ranks
def broadcast_by_hand(tensor: Tensor, src: int) -> None:
    """Replace tensor, in place, by rank src's.

    Comm: world_size − 1 messages of tensor's bytes, over all ranks.
    """
    ### BEGIN SOLUTION
    if dist.get_rank() != src:
        dist.recv(tensor, src=src)
        return
    for other in range(dist.get_world_size()):
        if other != src:
            dist.send(tensor, dst=other)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-broadcast-by-hand" points=3
check.broadcast_by_hand()

# %% [markdown]
# ## Your own figures
#
# Your `pass_right` is enough for an all-reduce: let each tensor travel once around the circle, and add what comes by.
# Does it agree with torch's?


# %%
# %%ranks
def ring_sum(tensor):
    """Sum tensor over the ranks, passing whole tensors on. → a new one"""
    total, travelling = tensor.clone(), tensor
    for _ in range(world_size - 1):
        travelling = pass_right(travelling)
        total += travelling
    return total


mine = torch.arange(1000.0, device=device) * rank
theirs = mine.clone()
dist.all_reduce(theirs)
print("equal:", torch.equal(ring_sum(mine), theirs))

# %% [markdown]
# Who sends how much to whom, when 4 MB are summed? In the lesson rank 0's row and column were full. **Predict** the
# map.

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
# No rank is special any more. Put `broadcast_by_hand(torch.ones(1_000_000, device=device), src=1)` in the cell
# above, and see yours.

# %% [markdown]
# And the time, beside torch's? In the default group the ranks compare notes before each all-reduce. In a group of
# their own they do not:

# %%
# %%ranks
plain = dist.new_group()


def torchs_sum(tensor):
    dist.all_reduce(tensor, group=plain)


# %%
# %%ranks
import time


def fastest_ms(collective, elements, rounds=15):
    """Time collective(tensor), all ranks starting together. → the best"""
    tensor = torch.zeros(elements, device=device)
    collective(tensor)
    times_s = []
    for _ in range(rounds):
        dist.barrier(plain)
        began_s = time.perf_counter()
        collective(tensor)
        tensor[0].item()
        times_s.append(time.perf_counter() - began_s)
    return 1000 * min(times_s)


# %%
# %%ranks
sizes = [10**power for power in range(7)]
by_hand_ms = [fastest_ms(ring_sum, size) for size in sizes]
torchs_ms = [fastest_ms(torchs_sum, size) for size in sizes]

# %% tags=["nbval-ignore-output"]
sizes_bytes = [4 * size for size in ranks.pull("sizes")[0]]
by_hand = [max(times) for times in zip(*ranks.pull("by_hand_ms"), strict=True)]
torchs = [max(times) for times in zip(*ranks.pull("torchs_ms"), strict=True)]  # the last rank's
print(f"4 MB: {by_hand[-1]:.1f} ms by hand, {torchs[-1]:.1f} ms by torch")
plots.message_cost(sizes_bytes, {"by hand": by_hand, "torch": torchs})

# %% [markdown]
# Your circle sends three whole tensors per rank, 12 MB for 4. How few bytes are enough to leave the sum everywhere?
# Chapter 01 starts there.

# %%
ranks.stop()
