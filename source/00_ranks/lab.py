# ---
# jupyter:
#   course:
#     module: first_collectives
#     minutes: 55
# ---

# %% [markdown]
# # Lab 00 · First collectives
#
# **55 minutes, 15 points.** You will write five small functions that all ranks call together. The first one takes five
# minutes, and in the fourth, you fix a bug that makes many training scripts hang. At the end, you run an all-reduce
# that is built from one of your own functions.
#
# This is how a lab works:
#
# - Run its cells from top to bottom, as in the lesson.
# - Write each function where its cell says `your code here`, and run the cell. This defines the function on all ranks.
# - Then run the check below it. The check calls your function on up to four ranks, with new values each time. Each rank
#   gets only its own values, and the check counts the messages that your function sends.
# - If the check fails, it tells you what went wrong and on which rank, and asks a question as a hint. Change your
#   function, run its cell, and run the check again, as often as you like. *Run All* stops at the first check that has
#   not passed, so scroll up to find it.
# - Each exercise has at least one hint. Click it to open it.
# - An exercise with the word *Stretch* in its title is optional: no later lab depends on it. In this lab, exercise 0.5
#   is the optional one, and the totals above include its 5 minutes and 3 points.
#
# If a mistake makes the ranks hang, the course stops the cell and shows the doctor's report, as in the lesson. If the
# ranks have to be restarted, your imports and functions are restored automatically, and a message names the variables
# that were lost.
#
# The next two cells start the ranks, and import what your functions need on each of them.

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
# A training script often needs the sum of a value over all ranks: for example, how many samples they have seen. Each
# rank calls `sum_over_ranks` with its own value, and every rank gets the sum. If `value_of[rank]` is the value of a
# rank, the result on every rank is:
# ```python
# total = 0.0
# for rank in range(world_size):
#     total += value_of[rank]
# ```
#
# - Call **one** all-reduce of 8 bytes. The tensor may be on the CPU, because the course's ranks have gloo even if
#   there are GPUs. In a script with NCCL alone, it would have to be on the rank's GPU.
# - Keep the full precision of a Python float, which has 64 bits.
# - Return a float. `tensor.item()` returns the value of a tensor with one element.
#
# <details><summary>Hint</summary>A collective takes a tensor, so you have to create one from the value. How many bytes
# does an element of <code>torch.tensor(0.1)</code> have? <code>torch.tensor</code> has an argument that changes
# this.</details>


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
# The last batch of an epoch is often smaller on some ranks than on others. So in this exercise, the ranks hold float64
# tensors of different lengths: nine values, one, or even none. Each rank calls `global_mean` with its own tensor,
# `values`, and every rank gets the mean of all values on all ranks:
# ```python
# everything = []
# for rank in range(world_size):
#     everything += values_of[rank].tolist()
# mean = sum(everything) / len(everything)
# ```
#
# - Call **one** all-reduce of 16 bytes.
# - A rank without values calls the all-reduce, too. You can assume that at least one rank has a value.
# - Do not change `values`.
#
# <details><summary>Hint</summary>Suppose that one rank holds 1, 2 and 3, and another one holds 10. Their means are 2
# and 10, and the mean of these means is 6, but the right answer is 4. Which two numbers must each rank contribute, so
# that every rank can compute 4?</details>


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
# This is the ring from the lesson, but without the hang. Every rank sends its tensor to its right neighbor (rank + 1),
# and returns the tensor that it receives from its left neighbor (rank − 1). The last rank's right neighbor is rank 0:
# ```python
# for rank in range(world_size):
#     result_of[(rank + 1) % world_size] = tensor_of[rank]
# ```
#
# - Each rank sends **one** message and receives **one**. The tensors may have any shape and dtype.
# - Do not change `tensor`: receive into a new one.
# - Return only when both messages are complete, because the caller may change `tensor` right afterwards.
# - A rank cannot `send` to itself. So with a single rank, return the tensor or a copy of it.
#
# <details><summary>Hint</summary>In the lesson's ring, every rank waited for a message before it sent one. Which call
# launches a send and a receive together, without waiting for either?</details>
#
# <details><summary>A second hint</summary>In the lesson, ranks swapped tensors with
# <code>dist.batch_isend_irecv</code>. There, both operations of a rank had the same partner. Which partners do they
# have here, and when may you return the tensor that you have received?</details>


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
# With gloo, separate calls to `isend` and `irecv` pass this check, too: gloo can run several transfers at once, but
# NCCL may run them one after another. So **with NCCL, batch the sends and receives, or let the ranks take turns**.
#
# After the lab, you can try this without a GPU: `ranks.start(4, backend="gloo:cpu", simulate="nccl")` starts new ranks
# that simulate NCCL. Then run the imports, your function and its check again.

# %% [markdown]
# ## Exercise 0.4 · Break it, then fix it (10 min, 3 points)
#
# Each rank has the loss of its own samples, and rank 0 should print the mean of all losses. Many training scripts
# contain a function like the one below. Run its cell, and study the doctor's report before you read on. Which rank
# waits? Which ranks is it waiting for? Why do they never call the collective?


# %% tags=["raises-exception"]
# %%ranks
def log_loss(loss):
    if rank == 0:
        dist.all_reduce(loss)
        print(f"mean loss {loss.item() / world_size:.3f}")


log_loss(torch.tensor(2.0 + rank, device=device))

# %% [markdown]
# Only rank 0 calls the all-reduce, so it waits for the others forever. The function also has a second bug, which raises
# no error: what would `loss` hold after the all-reduce?
#
# Write `log_mean_loss(loss)`, a version without these bugs:
#
# - Rank 0 returns the mean as a float. The other ranks return `None`.
# - `loss` must not change, and `loss.backward()` must still work afterwards.
# - Call **one** all-reduce, of the size of the loss (or of 8 bytes, if you convert the loss to float64).
#
# <details><summary>Hint</summary>Which line must all ranks run, and which line is for rank 0 only? The all-reduce
# overwrites its argument. Which tensor can you pass instead of <code>loss</code>?</details>
#
# <details><summary>A second hint</summary>The tensor that you pass should have the same value, but its own memory.
# After <code>detach()</code> alone, it still shares the loss's memory.</details>


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
# ## Exercise 0.5 · Stretch: a broadcast by hand (5 min, 3 points)
#
# In the lesson, `dist.broadcast` copied the tensor of one rank to all others. Build it yourself, for any source:
# ```python
# for rank in range(world_size):
#     tensor_of[rank][:] = tensor_of[src]
# ```
#
# - Use only `dist.send` and `dist.recv`, and overwrite `tensor` in place.
# - Send **N − 1** messages in total on N ranks, for any `src`.
# - Rank `src` may send all of them, one after the other. A faster algorithm is welcome if it sends no more messages.
#
# <details><summary>Hint</summary>Write it for two ranks first: which rank sends, and which one receives? With more
# ranks, one of the two cases becomes a loop. Which rank must the loop leave out?</details>


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
# ## An all-reduce of your own (10 min)
#
# Your `pass_right` is enough to build an all-reduce: pass the tensors around the ring until every rank has received all
# of them, and add them up on the way. Is the result the same as that of `dist.all_reduce`?


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
# In the lesson, rank 0 added up tensors of 4 MB for all ranks. On the map of the messages, one row and one column were
# filled.
#
# **Predict.** How many megabytes does each rank send to each of the others when your ring adds up tensors of 4 MB? Draw
# the map on paper, and then run the next two cells.

# %%
# %%ranks
from shared import wire

with wire.ledger() as log:
    ring_sum(torch.ones(1_000_000, device=device))

# %%
plots.traffic([log.sent_mb_to(4) for log in ranks.pull("log")])

# %% [markdown]
# No rank has a special role anymore. To see the map of your broadcast, go back two cells and replace `ring_sum(…)`
# with `broadcast_by_hand(torch.ones(1_000_000, device=device), src=1)`.
#
# How long does your all-reduce take, compared with `dist.all_reduce`? As in the lesson, `measure.collectives` times
# both:

# %%
# %%ranks
from shared import measure

times = measure.collectives({"by hand": ring_sum, "torch": dist.all_reduce})

# %% [markdown]
# The table and the figure show the same medians. In the table's note, *loopback* is a machine's connection to itself.
# As in the lesson, the dotted line leaves out the latency. It goes through the shorter time for 4 MB. At which sizes do
# the bytes decide how far apart the two all-reduces are?

# %% tags=["nbval-ignore-output"]
times = ranks.pull("times")[0]
print(times)
plots.message_cost(times.sizes_bytes, times.measured_ms)

# %% [markdown]
# For small tensors, the bytes hardly count. The ranks wait for messages and, on a machine with fewer cores than ranks,
# for a core. How long that takes is a matter of chance, so if you measure again, the ratio may differ a lot. For 4 MB,
# your ring spends most of its time on moving bytes: twice as many as torch's all-reduce, and it never adds and receives
# at the same time.
#
# These are times on one machine, where all ranks share cores and memory. The bytes are the same on any cluster: in your
# ring, each rank sends three full tensors, so it sends 12 MB to add up tensors of 4 MB. How few bytes would be enough
# to give every rank the sum? In chapter 01, you find out.

# %%
ranks.stop()
