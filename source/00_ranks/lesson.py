# ---
# jupyter:
#   course:
#     module: first_collectives
#     minutes: 20
# ---

# %% [markdown]
# # 00 · Ranks
#
# **20 minutes.** You will be able to
#
# - run code on four processes at once, and say what they share,
# - predict what `all_reduce`, `send` and `recv` leave on every rank, and who waits for whom,
# - read why a cell hangs, and name the rank to look at,
# - say which times measured on this machine mean something.
#
# You need PyTorch tensors, and nothing about distributed training.

# %%
from shared import progress

progress.show()  # run this cell again to see where you are

# %% [markdown]
# ## Why more than one process
#
# Training with Adam in mixed precision holds 16 bytes per parameter (ZeRO paper, §3.1): for 7 billion parameters
# that is 112 GB before the first activation. A GPU with 80 GB cannot even start. A smaller model may fit, and still
# take longer than you can wait.
#
# Either way several processes, each with a device and a memory of its own, must act as one. All they can do for that
# is to send each other tensors. This chapter is about that one act.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks

ranks.start(world_size=4)

# %% [markdown]
# Four processes run now, beside the notebook's own. The field's words for them:
#
# | | |
# |---|---|
# | rank | the number of a process, from 0 |
# | world size | how many there are |
# | backend | who carries the messages: gloo between CPUs, NCCL between GPUs |
# | device | where this rank's tensors live |
#
# A cell that begins with `%%ranks` runs in all four at once.

# %%
# %%ranks
print(f"I am rank {rank} of {world_size}")

# %% [markdown]
# Ranks that print the same are shown as one line:

# %%
# %%ranks
print(f"{world_size} ranks")

# %% [markdown]
# ## They share nothing
#
# Every rank sets `x`. Then ranks 0 and 2 set it again. What does rank 1 hold?

# %%
# %%ranks
x = 10 * rank

# %%
# %%ranks 0,2
x = 99

# %%
# %%ranks
print(x)

# %% [markdown]
# Four variables, all called `x`, in four memories. The notebook itself has none; it can only ask for copies:

# %%
print("x" in globals(), ranks.pull("x"))

# %% [markdown]
# Keep this in mind when training goes wrong: a rank whose value is off raises no error. Nobody else can see it.

# %% [markdown]
# ## The first collective
#
# Let rank *r* hold *r* + 1, and let all ranks call `dist.all_reduce`. **Predict** what rank 2 holds afterwards.

# %%
my_prediction = 0.0

# %%
# %%ranks
total = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(total)

# %%
measured = ranks.pull("total")[2].item()
print(f"predicted {my_prediction:g}, measured {measured:g}")

# %% [markdown]
# 1 + 2 + 3 + 4 = 10, and *every* rank has it:

# %%
# %%ranks
print(total.item())

# %% [markdown]
# *Reduce*: many values become one, by an operation, here a sum. *All*: every rank gets the result. It works **in
# place**: what a rank held before is gone. What does a second call leave, then?

# %%
# %%ranks
dist.all_reduce(total)
print(total.item())

# %% [markdown]
# Four ranks held 10, so 40. The operation may be another one. A mean is a sum that you divide yourself
# (`ReduceOp.AVG` does it for you, where the backend knows it):

# %%
# %%ranks
largest = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(largest, op=dist.ReduceOp.MAX)

mean = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(mean, op=dist.ReduceOp.SUM)
mean /= world_size
print(f"largest {largest.item()}, mean {mean.item()}")

# %% [markdown]
# Put gradients in place of `mean`, and that is data parallelism: chapter 02.
#
# ## From one rank to one other
#
# `send` and `recv` come in pairs. The receiver brings a tensor to be filled.

# %%
# %%ranks
parcel = torch.tensor([rank + 0.5], device=device)
if rank == 0:
    dist.send(parcel, dst=3)
if rank == 3:
    dist.recv(parcel, src=0)
print(parcel.item())

# %% [markdown]
# Now rank 0 is half a second late. Rank 3 pays for it:

# %% tags=["nbval-ignore-output"]
# %%ranks
import time

began_s = time.perf_counter()
if rank == 0:
    time.sleep(0.5)
    began_s = time.perf_counter()
    dist.send(parcel, dst=3)
if rank == 3:
    dist.recv(parcel, src=0)
    parcel.item()  # on a GPU it is this line that waits
waited_s = time.perf_counter() - began_s
print(f"waited {waited_s:.1f} s")
assert rank != 3 or waited_s > 0.4

# %% [markdown]
# A send over gloo waits just so for a receiver who is late.
#
# ## Everyone waits for the last
#
# **Predict.** Rank 2 works for 0.4 s before it calls `all_reduce`, the others for 0.1 s. After how many seconds does
# rank 0 have its sum?

# %%
my_prediction_s = 0.0

# %%
# %%ranks
dist.barrier()  # returns when all ranks have come to it
began_s = time.perf_counter()
time.sleep(0.4 if rank == 2 else 0.1)
arrived_s = time.perf_counter()
total = torch.ones(1, device=device)
dist.all_reduce(total)
total.item()
left_s = time.perf_counter()

# %% tags=["nbval-ignore-output"]
began, arrived = ranks.pull("began_s"), ranks.pull("arrived_s")
left = ranks.pull("left_s")
took_s = left[0] - began[0]
print(f"predicted {my_prediction_s:.2f} s, measured {took_s:.2f} s")
assert left[0] > arrived[2]
plots.waiting(began, arrived, left, waits_in="all_reduce")

# %% [markdown]
# No rank can have the sum before the last one has brought its part. In training, the slowest rank sets the pace of
# all.
#
# ## When one rank does not come
#
# Rank 1 skips the call. **Predict** for ranks 0, 2 and 3: an error, a wrong number, or silence?

# %% tags=["raises-exception"]
# %%ranks
total = torch.ones(1, device=device)
if rank != 1:
    dist.all_reduce(total)

# %% [markdown]
# Silence: they wait for ever. Here the course's *doctor* looks at all ranks, finds that the call can never happen,
# and ends the cell. Read its table from the right: who is *not* waiting, and which line did it reach last? That
# rank is the one to look at; the waiting ones are innocent.
#
# On a cluster there is no doctor. By torch's default nothing is said for 10 minutes with NCCL, 30 with gloo, and then
# the innocent ranks raise (gloo), or are ended (NCCL's watchdog).
#
# The group of the hung cell is lost; a new one stands ready. What the ranks hold is kept:

# %%
# %%ranks
dist.all_reduce(mean, op=dist.ReduceOp.MAX)
print(f"mean is still {mean.item()}")

# %% [markdown]
# ## Three more ways to stop four ranks
#
# **A circle.** Each rank receives from its left neighbour, then sends to its right one. Every message has a sender
# and a receiver. What is wrong?

# %% tags=["raises-exception"]
# %%ranks
left, right = (rank - 1) % world_size, (rank + 1) % world_size
dist.recv(parcel, src=left)
dist.send(parcel, dst=right)

# %% [markdown]
# Nobody sends before having received. You will untie this in the lab.
#
# **Another shape.** Rank 2 brings three numbers, the others four:

# %% tags=["raises-exception"]
# %%ranks
numbers = torch.ones(3 if rank == 2 else 4, device=device)
dist.all_reduce(numbers)

# %% [markdown]
# Ranks compare notes before each collective here, so that the odd one is named. Left alone, gloo gives some ranks wrong
# numbers and lets others wait, or ends a process, as the sizes fall. NCCL promises no better.
#
# **An error on one rank**, while the others wait for it:

# %% tags=["raises-exception"]
# %%ranks
if rank == 2:
    raise ValueError("the batch is empty")
dist.all_reduce(total)

# %% [markdown]
# Only rank 2's own words tell the cause. In the log of a real job every other rank complains too, with gloo of
# a closed connection: look for the rank that says something else.
#
# So there is one rule. **All ranks call the same collectives, in the same order, with the same shapes and dtypes; and
# each send has its recv, and somebody who begins.**

# %% [markdown]
# ## What a message costs
#
# Comparing notes costs messages of its own, so we measure without it. Another setting means fresh ranks:

# %% tags=["nbval-ignore-output"]
ranks.start(world_size=4, detect_mismatch=False)

# %% [markdown]
# The first call also pays for setting up, so it is not counted. Of the others we keep the fastest: the one that other
# programs disturbed least.

# %%
# %%ranks
import time


def fastest_ms(collective, elements, rounds=20):
    """Time collective(tensor), all ranks starting together. → the best"""
    tensor = torch.zeros(elements, device=device)
    collective(tensor)
    times_s = []
    for _ in range(rounds):
        dist.barrier()
        began_s = time.perf_counter()
        collective(tensor)
        tensor[0].item()
        times_s.append(time.perf_counter() - began_s)
    return 1000 * min(times_s)


# %% [markdown]
# **Predict.** 4 MB are a million times the bytes of 4 B. How many times longer does their all-reduce take?

# %%
my_prediction_ratio = 0.0

# %%
# %%ranks
measured_ms = [fastest_ms(dist.all_reduce, 10**power) for power in range(8)]

# %% tags=["nbval-ignore-output"]
of_ranks = ranks.pull("measured_ms")
measured_ms = [max(times) for times in zip(*of_ranks, strict=True)]  # the last rank's
ratio = measured_ms[6] / measured_ms[0]  # 4 MB to 4 B
print(f"predicted {my_prediction_ratio:g}, measured {ratio:.0f} times")
assert 1 < ratio < 100_000
sizes_bytes = [4 * 10**power for power in range(8)]
plots.message_cost(sizes_bytes, {"all_reduce": measured_ms})

# %% [markdown]
# Two regimes. On the left the time hardly depends on the size: a message costs something merely for being one. On the
# right it grows with the bytes. Chapter 01 fits both numbers; chapter 03 lives from the gap between them.
#
# Which figures can you trust here?
#
# | | on this machine |
# |---|---|
# | messages, bytes | exact: the same on any cluster |
# | values | the same up to rounding: sums are taken in another order |
# | bytes of the tensors a rank holds | exact |
# | times | one against another, within one run |
# | speed-up with more ranks | no, as long as ranks share cores |

# %% [markdown]
# ## The same outside a notebook
#
# In production a script is started once per rank, by `torchrun`. It learns its place from the environment.

# %%
import os
import subprocess
import sys
import tempfile

folder = tempfile.TemporaryDirectory()
os.chdir(folder.name)

# %%
# %%writefile hello.py
import os

import torch
import torch.distributed as dist

dist.init_process_group("gloo")  # reads RANK, WORLD_SIZE, MASTER_ADDR
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)

names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
place = " ".join(f"{name}={os.environ[name]}" for name in names)
print(f"{place}: {total.item()}\n", end="")  # no mixed lines
dist.destroy_process_group()

# %% [markdown]
# In a terminal this is `torchrun --standalone --nproc-per-node=4 hello.py`:

# %%
torchrun = [sys.executable, "-m", "torch.distributed.run"]
command = [*torchrun, "--standalone", "--nproc-per-node=4", "hello.py"]
done = subprocess.run(command, capture_output=True, text=True, timeout=100)
print("\n".join(sorted(done.stdout.splitlines())))

# %% [markdown]
# The same 10. What differs:
#
# | | here | `torchrun` |
# |---|---|---|
# | starts the processes | `ranks.start` | one `torchrun` per machine |
# | ranks meet at | the notebook | `MASTER_ADDR:MASTER_PORT` |
# | variables live | from cell to cell | until the script ends |
# | one rank fails | explained; the next cell works | all are ended, or restarted (`--max-restarts`) |
# | ranks hang | explained in seconds | silence until the group's timeout |
# | the end | `ranks.stop` | `destroy_process_group` |
#
# `RANK` counts over all machines, `LOCAL_RANK` within one. With four GPUs in each of two machines:
#
# | `RANK` | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | machine | 0 | 0 | 0 | 0 | 1 | 1 | 1 | 1 |
# | `LOCAL_RANK` | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 |
#
# Code that circulates says `torch.cuda.set_device(dist.get_rank())`. Which GPU does rank 5 ask for? The sixth of four:
# that line works until the day you get a second machine. `set_device(int(os.environ["LOCAL_RANK"]))` works on both.
#
# On GPUs, also tell the group which device is yours: `dist.init_process_group("nccl", device_id=device)`. NCCL then
# connects all ranks in this call. Without `device_id`, it does so in the middle of their first collective, where a rank
# that is missing looks like any other hang. `solutions/process_group.py` shows the whole start of such a script.

# %% [markdown]
# ## Recap
#
# | call | who takes part | afterwards | waits for |
# |---|---|---|---|
# | `all_reduce(t)` | all | all hold the sum, in place | the last rank |
# | `all_reduce(t, op=MAX)` | all | all hold the largest | the last rank |
# | `send(t, dst)` | two | unchanged | the receiver (gloo) |
# | `recv(t, src)` | two | `t` is what was sent | the sender |
# | `barrier()` | all | nothing | the last rank |
#
# ## What is still missing
#
# What does an all-reduce *do*? Let us write the obvious one: rank 0 collects, adds up and hands out.


# %%
# %%ranks
def sum_at_rank_0(tensor):
    """Sum tensor over the ranks, in place, the obvious way."""
    if rank != 0:
        dist.send(tensor, dst=0)
        dist.recv(tensor, src=0)
        return
    arrived = torch.empty_like(tensor)
    for other in range(1, world_size):
        dist.recv(arrived, src=other)
        tensor += arrived
    for other in range(1, world_size):
        dist.send(tensor, dst=other)


# %% [markdown]
# The course's *wire ledger* writes down every message that a rank launches. Here are 4 MB, summed:

# %%
# %%ranks
from shared import wire

tensor = torch.full((1_000_000,), rank + 1.0, device=device)
with wire.ledger() as log:
    sum_at_rank_0(tensor)
print(tensor[0].item())

# %%
logs = ranks.pull("log")
logs[0].table(times=False)

# %% [markdown]
# Six messages for rank 0; what it *must send* counts only what goes out. And the others?

# %%
logs[1].table(times=False)

# %% [markdown]
# All four ledgers as one map of who sent how much to whom:

# %%
sent_mb = [[0.0] * 4 for _ in range(4)]
for log in logs:
    for entry in log.entries:
        if entry.op == "send":
            sent_mb[log.rank][entry.partner] += entry.payload_bytes / 1e6
assert [log.sent_bytes / 1e6 for log in logs] == [12, 4, 4, 4]
plots.traffic(sent_mb)

# %% [markdown]
# The sum is right, and rank 0 does all the work: its row and its column are full, and the rest of the map is empty.
# The *timeline* of another such sum shows when:

# %%
# %%ranks
from shared import timeline

dist.barrier()
with timeline.record() as line:
    sum_at_rank_0(tensor)

# %% tags=["nbval-ignore-output"]
lines = ranks.pull("line")
assert [len(line.spans) for line in lines] == [6, 2, 2, 2]
plots.timeline(lines)

# %% [markdown]
# A bar is a message, from its call to its end. Ranks 1, 2 and 3 are served one after the other, and a bar that waits
# for its turn is long. With 64 ranks, rank 0 would carry 63 tensors in and 63 out, while the others wait.
#
# - How does `all_reduce` spread this work over all ranks, and how few bytes does it take? **Chapter 01** builds it.
# - How do ranks that share nothing train *one* model? **Chapter 02**.
#
# First, the lab: your own first collectives. This ends the ranks:

# %%
ranks.stop()
