# ---
# jupyter:
#   course:
#     module: first_collectives
# ---

# %% [markdown]
# # 00 · Ranks
#
# **45–65 minutes.** After this lesson, you will be able to:
#
# - run code in four processes at once, and say what they share and what they do not,
# - predict what each rank holds after `all_reduce`, `broadcast`, `send` and `recv`, and which rank waits for which,
# - read the report on a cell that hangs, and name the rank that caused it,
# - see in a measurement where latency decides how long an all-reduce takes, and where bandwidth does.
#
# You should know PyTorch tensors and have written a training loop. You don't need a GPU, or any experience with more
# than one.

# %% [markdown]
# ## How to use this page
#
# Welcome! In JupyterLab, this page is a notebook. Run its cells from top to bottom: click a cell and press
# **Shift+Enter**. The outputs you see now are from our own run, and yours will replace them.
#
# Where a paragraph begins with **Predict.**, write your estimate in the cell below it before you read on. A wrong
# estimate is useful, too: it shows you where to look more closely.
#
# After the lesson comes a lab, where you write code and the course checks it. The next cell shows your progress, and
# what comes next.

# %% tags=["nbval-ignore-output"]
from shared import progress

progress.show()

# %% [markdown]
# ## Four processes that train one model
#
# The next cell starts four processes on your machine. After a few seconds, a table shows one row per process.

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks
from shared.plots import diagrams

ranks.start(world_size=4)

# %% [markdown]
# A cell that begins with `%%ranks` runs in all four processes. The next one defines a training loop for handwritten
# digits, much like those you have written before. Each batch has 128 images, and the argument `samples` selects which
# of them to use. `torch` and `device` are already defined in every process; you will see below where they come from.


# %%
# %%ranks
from torch.nn.functional import cross_entropy

from shared.data import digits
from shared.models import MLP

images, labels = (data.to(device) for data in digits(torch.float64))


def train(model, samples, steps=300):
    """Train on some of the 128 images of each batch. Returns the loss of each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    generator, losses = torch.Generator().manual_seed(0), []
    for _ in range(steps):
        batch = torch.randint(1500, (128,), generator=generator)[samples]
        loss = cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# %% [markdown]
# First, each process trains a model alone, on all 128 images of each batch. Then the four processes train one model
# together. The variable `rank` is 0 in the first process and 3 in the last, so each process takes a different quarter
# of the batch: 32 images.

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

alone = train(MLP().double().to(device), slice(128))

model = DistributedDataParallel(MLP().double().to(device))
together = train(model, slice(32 * rank, 32 * rank + 32))

# %% [markdown] slideshow={"slide_type": "slide"}
# Do four processes that share the work learn as well as one that does all of it? Compare the two curves in the figure.
# For the second curve, we average the losses of the four processes in each step.

# %% slideshow={"slide_type": "-"}
alone = ranks.pull("alone")[0]
together = [sum(losses) / 4 for losses in zip(*ranks.pull("together"), strict=True)]
plots.loss_curves({"one process, 128 images": alone, "four processes, 32 each": together})

# %% tags=["claims"] jupyter={"source_hidden": true}
assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) < 1e-6

# %% [markdown]
# The curves lie on top of each other: in every step, the losses differ by less than a millionth.
#
# The only new thing is `DistributedDataParallel`. In each backward pass, it averages the gradients of all processes. So
# every process takes the optimizer step that one process would take with the whole batch.
#
# **You will write this class yourself.** In chapter 02, you build a version that works. By the end of chapter 04, yours
# communicates while backward is still computing, as PyTorch's does. From chapter 07 on, you also split the optimizer
# state, the gradients and the parameters, so that four GPUs together can train a model that is too large for one.
#
# Are four processes faster than one? Not here: they share the cores of one machine. Chapter 02 shows where the speed-up
# comes from when each process has its own GPU.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Why one process is not enough
#
# Training with Adam in mixed precision takes 16 bytes per parameter: 2 for its value, 2 for its gradient, and 12 for
# the optimizer (ZeRO paper, §3.1; chapter 06 says why). For 7 billion parameters, that is 112 GB: too much for a GPU
# with 80 GB. A smaller model may fit, but take too long to train on one GPU.
#
# In both cases, several GPUs have to work on one model. Each GPU gets its own process, and processes share no memory.
# The figure shows what each process has to itself, and what they have in common.

# %% slideshow={"slide_type": "-"}
diagrams.processes()

# %% [markdown]
# Each part of this figure has a name:
#
# - A **rank** is one of the processes that run together. The word also means the process's index: with four processes,
#   the ranks are 0 to 3.
# - The **world size** is the number of ranks.
# - A **process group** is a set of ranks that communicate with each other. `ranks.start` has formed one that contains
#   all four.
# - The **backend** is the library that moves tensors between ranks: NCCL between GPUs, gloo between CPUs.
#
# The table below `ranks.start` shows your backend, and the **device** of each rank: the GPU or CPU that holds its
# tensors.

# %% [markdown]
# ## Cells on every rank
#
# All ranks run the next cell. Each line of the output begins with the rank that printed it:

# %%
# %%ranks
print(f"I am rank {rank} of {world_size}")

# %% [markdown]
# You never defined `rank` or `world_size`. When a rank starts, the course defines five names on it:
#
# | name | what it is |
# |---|---|
# | `torch` | PyTorch |
# | `dist` | `torch.distributed`, PyTorch's package for communication |
# | `rank` | the index of this rank, also available as `dist.get_rank()` |
# | `world_size` | the number of ranks, also available as `dist.get_world_size()` |
# | `device` | this rank's device, as in `torch.ones(3, device=device)` |
#
# You import or define everything else yourself, in a `%%ranks` cell. It stays defined on the ranks for all later cells.

# %% [markdown]
# ## Separate memories
#
# After `%%ranks`, you can list the ranks that should run a cell. First, every rank sets `x`. Then only ranks 0 and 2
# set it again. What is `x` on rank 1 afterwards?

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
# There are four variables called `x`, in four memories. Remember this when a training run goes wrong: if one rank holds
# a wrong value, you get no error, because no other rank can see it.
#
# A cell without `%%ranks` runs in the notebook's own process, which is not a rank and has no `x`. `ranks.pull` copies a
# variable from every rank to the notebook:

# %%
print("x" in globals(), ranks.pull("x"))

# %% [markdown]
# ## The first collective
#
# A **collective** is an operation that all ranks of a process group call together. The most important one for training
# is the **all-reduce**: every rank contributes a tensor, and every rank gets the sum of all tensors.
#
# **Predict.** Each rank holds one element: rank 0 holds 1, rank 1 holds 2, and so on. All four call `dist.all_reduce`
# on it twice in a row. Which value does rank 2 hold afterwards?

# %%
my_prediction = None

# %%
# %%ranks
total = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(total)
dist.all_reduce(total)

# %%
print(f"rank 2 holds {ranks.pull('total')[2].item():g}")

# %% [markdown] slideshow={"slide_type": "slide"}
# Every rank has the sum after the first call: 1 + 2 + 3 + 4 = 10. `all_reduce` works in place: it overwrites the
# tensor, and the old values are gone. So in the second call, every rank contributes 10, and the sum is 40.
#
# In the figure, each rank holds four elements. Compare them before and after one all-reduce.

# %% slideshow={"slide_type": "-"}
diagrams.collective("all_reduce")

# %% [markdown]
# To get the mean, divide the sum by the world size. With `op=dist.ReduceOp.MAX`, you get the maximum instead.

# %%
# %%ranks
mean = torch.tensor([rank + 1.0], device=device)
dist.all_reduce(mean)
mean /= world_size
print(mean.item())

# %% [markdown]
# Replace `mean` with a gradient, and you have what `DistributedDataParallel` did in each backward pass.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## A broadcast
#
# Averaging gradients only helps if all ranks start with the same parameters. A **broadcast** makes sure of that: one
# rank, the *source*, sends its tensor to all others. In the figure, the source is rank 0.

# %% slideshow={"slide_type": "-"}
diagrams.collective("broadcast")

# %% [markdown]
# The argument `src` is the rank of the source. All ranks pass the same `src`, and the tensors of all other ranks are
# overwritten:

# %%
# %%ranks
weights = torch.full((3,), float(rank), device=device)
dist.broadcast(weights, src=2)
print(weights.tolist())

# %% [markdown]
# ## Waiting for the last rank
#
# An all-reduce needs every rank's tensor. So what does a rank do that calls it too early?
#
# **Predict.** All ranks start together. Rank 2 works for 0.4 s before it calls `all_reduce`, and the others for 0.1 s.
# After how many seconds does rank 0 have the sum?

# %%
my_prediction_s = None  # seconds

# %% [markdown]
# To make the ranks start together, we use a **barrier**: a collective without a tensor. No rank continues until all
# ranks have called it.

# %%
# %%ranks
import time

dist.barrier()
began_s = time.perf_counter()
time.sleep(0.4 if rank == 2 else 0.1)
arrived_s = time.perf_counter()
total = torch.ones(1, device=device)
dist.all_reduce(total)
total.item()  # NCCL's all_reduce only launches work on the GPU: there, this line waits
left_s = time.perf_counter()

# %% [markdown]
# A **timeline** shows when each rank computes, and when it communicates or waits. In the timeline below, when do the
# other ranks stop waiting, and when does rank 2 stop working?

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
began, arrived, left = (ranks.pull(name) for name in ("began_s", "arrived_s", "left_s"))
print(f"rank 0 has the sum after {left[0] - began[0]:.2f} s")
plots.waiting(began, arrived, left, waits_in="all_reduce")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
assert left[0] > arrived[2]

# %% [markdown] slideshow={"slide_type": "-"}
# Rank 0 cannot have the sum before rank 2 has contributed its tensor. In training, the ranks wait for each other like
# this in every step, so the slowest rank sets the pace for all of them.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## A hang, and how to read it
#
# Sooner or later, one of your ranks will skip a collective that the others call.
#
# **Predict.** In the next cell, all ranks call a barrier, and then rank 1 skips the all-reduce. In a plain script, what
# would ranks 0, 2 and 3 get while rank 1 goes on computing: an error, a wrong value, or nothing?

# %%
my_prediction_for_others = ""

# %% tags=["raises-exception"] slideshow={"slide_type": "-"}
# %%ranks
dist.barrier()
if rank != 1:
    dist.all_reduce(total)

# %% [markdown]
# Nothing, until a timeout ends the job: after 10 minutes with NCCL, and after 30 with gloo. Until then, they would sit
# there in silence, and bill you for all GPUs. Waiting for something that never happens is called a **hang**.

# %% [markdown]
# Here, the course's **doctor** asks every rank where it is, sees that the all-reduce can never complete, and stops the
# cell. Read its report in this order:
#
# 1. **Who waits for whom?** The first sentence names the ranks that wait, the collective they wait in, and the rank
#    that is missing. The number after `#` counts the collectives. The first 300 or so came from
#    `DistributedDataParallel`.
# 2. **What did the missing rank do instead?** The second sentence tells you. Look for the bug there first: in this
#    case, the ranks that wait did nothing wrong.
# 3. **At which line?** In the table, the column `at` shows the line that a rank has reached. If the rank has left the
#    cell, you see the line of its last call: here, the barrier.
#
# After a hang, a process group cannot be used again. So the course has formed a new one, and kept your variables:

# %%
# %%ranks
dist.barrier()
print(f"mean is still {mean.item()}")

# %% [markdown]
# ## Two more ways to fail
#
# **Different shapes.** Rank 2 passes a tensor of three elements, and the others pass tensors of four:

# %% tags=["raises-exception"]
# %%ranks
values = torch.ones(3 if rank == 2 else 4, device=device)
dist.all_reduce(values)

# %% [markdown]
# This error comes from the course's **mismatch detection**: before each collective, the ranks check that they all
# called the same operation with the same shape and dtype. Without this check, gloo may return wrong values, hang, or
# crash a process, depending on the sizes. NCCL may do the same (NCCL's user guide, "Collective Operations").
#
# **An error on one rank.** Rank 2 fails while the others wait for it:

# %% tags=["raises-exception"]
# %%ranks
if rank == 2:
    raise ValueError("the batch is empty")
dist.all_reduce(total)

# %% [markdown]
# Only rank 2's error tells you the cause. In the log of a real job, the other ranks fail, too, often because a
# connection was closed. Look for the rank whose error is different.
#
# All three failures break one rule: **All ranks call the same collectives, in the same order, with the same shapes and
# dtypes.**
#
# > **Found in the wild.** A training run on four GPUs reports that it is done, and its checkpoints are on disk. Half an
# > hour later, the job fails. `trainer.save_checkpoint()`, which ends with a barrier, stood inside
# > `if trainer.is_global_zero:`, so only rank 0 called that barrier. NCCL matches collectives by their order, not by
# > their lines, so rank 0's extra barrier met the *next* barrier of the other ranks, and both completed. Then rank 0
# > came to that next barrier, and waited there alone for 30 minutes, PyTorch Lightning's default timeout, at a line
# > that had no bug (`alan-turing-institute/autocast`, issue 381 and pull request 386). So count the collectives of each
# > rank, as the doctor does: one rank has launched one more.

# %% [markdown]
# ## How long an all-reduce takes
#
# We time `all_reduce` on tensors from 400 B to 40 MB. Only two ranks take part, because four ranks on a machine with
# two cores would mostly wait for a core, and we want to see the communication. `ranks.world(2)` forms a process group
# of the first two, and `ranks.run` calls a function on both and returns their results.
#
# **Predict.** 40 MB is 100,000 times as many bytes as 400 B. How many times as long does the all-reduce take? 1 would
# mean that the size does not matter, and 100,000 that nothing else matters.

# %%
my_prediction_ratio = None


# %%
# %%ranks
from shared import measure


def time_all_reduces():
    sizes_bytes = [400 * 10**power for power in range(6)]
    return measure.collectives({"all_reduce": dist.all_reduce}, sizes_bytes)


# %%
with ranks.world(2):
    sweep = ranks.run(lambda: time_all_reduces())[0]

# %% [markdown]
# The dotted line is what you would get if bytes were the only cost: a tenth of the bytes, a tenth of the time. From
# which size on does the measured time follow this line?

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
times_s = sweep.measured_s["all_reduce"]
print(f"40 MB take {times_s[40_000_000] / times_s[400]:.0f} times as long as 400 B")
plots.message_cost(sweep.sizes_bytes, sweep.measured_ms)

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(times_s[4_000] < 3 * times_s[400], "4 KB take about as long as 400 B")
growth = {size: times_s[10 * size] / times_s[size] for size in (400, 4_000_000)}
measure.expect(growth[400] < growth[4_000_000], "the time grows faster on the right")

# %% [markdown] slideshow={"slide_type": "-"}
# On the left, ten times the bytes hardly take longer. Most of that time is **latency**, the price of sending anything
# at all. Here, it is Python and the operating system: launching the call, and waking up the other process. Further
# right, in our run from 4 MB on, the bytes take over, and ten times as many take about ten times as long. The number of
# bytes that move per second is the **bandwidth**.
#
# So one all-reduce of 4 KB is much cheaper than ten of 400 B, which pay the latency ten times. Chapter 01 turns this
# figure into a formula, and chapter 03 uses it to make training steps faster.

# %% [markdown]
# Your four ranks share one machine. Which results would be the same on a cluster?
#
# | result | on a cluster |
# |---|---|
# | what you send: messages, bytes, shapes | identical |
# | values | the same up to rounding, because sums are taken in another order |
# | times | different, but you can compare times from the same run |
# | the speed-up with more ranks | different: here it means nothing, because the ranks share cores |

# %% [markdown]
# ## An all-reduce built from `send` and `recv`
#
# What happens inside an all-reduce? The ranks send each other tensors. In **point-to-point communication**, one rank
# calls `send` and another one calls `recv`. The receiver passes a tensor of the right shape and dtype, and the message
# (the tensor that was sent) overwrites it. Both calls block: `recv` waits until the message has arrived. With gloo,
# `send` waits until the receiver has called `recv`.
#
# In the simplest all-reduce, rank 0 receives all tensors, adds them up, and sends the sum to everybody:


# %%
# %%ranks
def sum_at_rank_0(tensor):
    """Replace the tensor on every rank by the sum of all ranks' tensors."""
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
# Let's add up tensors of 4 MB. The course's **wire ledger** records every message that a rank sends or receives. In the
# ledger of rank 0, `payload` is the size of each message, and `must send` is how much of it rank 0 had to send: nothing
# for a `recv`.

# %%
# %%ranks
from shared import wire

tensor = torch.full((1_000_000,), rank + 1.0, device=device)
with wire.ledger() as log:
    sum_at_rank_0(tensor)
print(f"every element is {tensor[0].item()}")

# %%
logs = ranks.pull("log")
logs[0].table(times=False)

# %% [markdown]
# Rank 0 received three tensors and sent three. The next figure combines all four ledgers into a map that shows how many
# megabytes each rank sent to each of the others:

# %%
plots.traffic([log.sent_mb_to(4) for log in logs])

# %% tags=["claims"] jupyter={"source_hidden": true}
assert [log.sent_bytes / 1e6 for log in logs] == [12, 4, 4, 4]

# %% [markdown]
# Only the row and the column of rank 0 are filled: rank 0 is the sender or the receiver of every message. It serves
# ranks 1, 2 and 3 one after the other, so the others mostly wait for their turn.
#
# ## A ring that hangs
#
# Could all ranks send at the same time? Let them form a ring. Each one first receives from its left neighbor, and then
# sends to its right neighbor. Every message has a sender and a receiver, so why does the ring hang?

# %% tags=["raises-exception"]
# %%ranks
mine = torch.tensor([rank + 0.5], device=device)
theirs = torch.empty_like(mine)
dist.recv(theirs, src=(rank - 1) % world_size)
dist.send(mine, dst=(rank + 1) % world_size)

# %% [markdown]
# Every rank waits to receive before it sends, so no rank ever sends. Hence the second rule: **Each `send` has a
# matching `recv`, and ranks never wait for each other in a circle.** You will fix this ring in the lab. In the report,
# the number after `#` counts the messages from one sender: rank 0 waits in `recv #2 from rank 3`, because it received
# the first in the all-reduce above.
#
# One remedy is an **asynchronous operation**: it launches communication and returns a **handle** immediately. The
# communication is then in flight while your code continues, and the handle's `wait()` returns when you can use the
# result. The asynchronous versions of `send` and `recv` are `isend` and `irecv`, and any collective is asynchronous if
# you pass `async_op=True`.
#
# A rank that sends *and* receives should launch both as one batch. NCCL may run separate calls one after the other: a
# rank's `irecv` then begins only when its `isend` is complete, so two ranks that both send first may hang.
# `dist.batch_isend_irecv` takes a list of operations and returns a list of handles. Here, ranks 0 and 3 swap tensors,
# and so do ranks 1 and 2:

# %%
# %%ranks
partner = world_size - 1 - rank
swap = [dist.P2POp(dist.isend, mine, partner), dist.P2POp(dist.irecv, theirs, partner)]
for handle in dist.batch_isend_irecv(swap):
    handle.wait()
print(f"sent {mine.item()}, received {theirs.item()}")

# %% [markdown]
# Do not touch a tensor while its operation is in flight. After the `wait()` of `irecv`, the message is in your tensor.
# After the `wait()` of `isend`, you may change or free the tensor that you sent. So keep every handle, and call
# `wait()` on each of them.

# %% [markdown]
# ## The same in a script
#
# In production, you train with a script instead of a notebook. `torchrun` starts it once per rank, and sets environment
# variables that tell each process which rank it is. `init_process_group` reads them and forms the process group. Here
# is the script `labs/hello.py`:

# %%
from pathlib import Path

hello = Path(plots.__file__).parents[2] / "labs" / "hello.py"
print(hello.read_text())

# %% tags=["claims"] jupyter={"source_hidden": true}
import subprocess
import sys

torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
done = subprocess.run([*torchrun, str(hello)], capture_output=True, text=True, timeout=100)
said = [f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE=4: 10.0" for rank in range(4)]
assert sorted(done.stdout.splitlines()) == said

# %% [markdown]
# Try it in a terminal. Each of the four ranks prints 10.0:
#
# ```
# torchrun --standalone --nproc-per-node=4 labs/hello.py
# ```
#
# With several machines, or *hosts*, you run the same command on each, with the address of one of them:
#
# ```
# torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=host0:29500 labs/hello.py
# ```
#
# A rank then has two indices: `RANK` counts the ranks of all hosts, and the **local rank** counts those of one host.
# With four GPUs on each of two hosts:
#
# | `RANK` | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
# |---|---|---|---|---|---|---|---|---|
# | host | 0 | 0 | 0 | 0 | 1 | 1 | 1 | 1 |
# | `LOCAL_RANK` | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 |
#
# You will find scripts that call `torch.cuda.set_device(dist.get_rank())`. In this example, rank 5 would ask for GPU 5,
# but its host only has GPUs 0 to 3. Use `int(os.environ["LOCAL_RANK"])` instead.
#
# With NCCL, pass the device as well: `dist.init_process_group("nccl", device_id=device)`. The ranks then contact each
# other in this call, so a wrong network interface or a firewall shows up at once. By default, the fast connections
# between the GPUs still wait for the first collective. At the end, `destroy_process_group` closes all of them.
#
# A program that every process runs, each on its own data, is called **SPMD**: single program, multiple data. All
# programs of this course are SPMD.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Recap
#
# | call | who calls it | afterwards | waits for |
# |---|---|---|---|
# | `all_reduce(t)` | all ranks | every rank holds the sum, in place | the last rank |
# | `broadcast(t, src)` | all ranks | every rank holds the tensor of `src`, in place | the message from `src` |
# | `barrier()` | all ranks | no change | the last rank |
# | `send(t, dst)` | one rank | no change | the receiver (with gloo) |
# | `recv(t, src)` | one rank | `t` holds what was sent | the sender |
#
# `isend`, `irecv` and `async_op=True` do the same, but return a handle immediately. You wait with `handle.wait()`.
#
# **Terms**
#
# - **rank**: one of the processes that run together, and its index among them, counted from 0.
# - **world size**: the number of ranks.
# - **process group**: a set of ranks that communicate with each other.
# - **backend**: the library that moves tensors between ranks, such as NCCL between GPUs and gloo between CPUs.
# - **device**: the GPU or CPU that holds a rank's tensors.
# - **collective**: an operation that all ranks of a process group call together.
# - **all-reduce**: every rank contributes a tensor, and every rank gets the sum (or the maximum, for example).
# - **broadcast**: one rank, the source, sends its tensor to all others.
# - **barrier**: a collective without a tensor; no rank continues until all ranks have called it.
# - **point-to-point communication**: one rank sends a tensor, and one other rank receives it.
# - **asynchronous operation**: an operation that launches communication and returns a handle immediately.
# - **handle**: the object that an asynchronous operation returns; its `wait()` returns when the result can be used.
# - **hang**: ranks wait for something that never happens, for example for a rank that never calls the same collective.
# - **doctor**: the part of the course that reports on a cell that hangs or fails: which rank waits for which, and at
#   which line.
# - **mismatch detection**: before each collective, the ranks check that they all called the same operation with the
#   same shape and dtype.
# - **latency**: the time that a message takes no matter how small it is.
# - **bandwidth**: the number of bytes that move per second.
# - **wire ledger**: the course's list of the messages and collectives of a rank, with their bytes.
# - **timeline**: a record of when each rank computes, and when it communicates or waits.
# - **local rank**: the index of a rank among the ranks of its host.
# - **SPMD** (single program, multiple data): all processes run the same program, each on its own data.

# %% [markdown]
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): what takes the doctor's place when a job of many hosts hangs.
# - [Writing Distributed Applications with PyTorch](https://docs.pytorch.org/tutorials/intermediate/dist_tuto.html): the
#   same first steps in plain scripts, with pictures of six collectives.
# - [Flight Recorder](https://docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html): how to turn it on, and
#   how to read what it has recorded.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What is still wasted
#
# In the all-reduce that we built, rank 0 does all the work while the others wait. With 64 ranks, it would receive 63
# tensors and send 63. How does a real all-reduce divide this work among all ranks, and what is the smallest number of
# bytes that each of them must send? You will build one in chapter 01.
#
# First, write your own small collectives in [the lab](../labs/00_ranks_lab.ipynb). There you will fix the ring, and a
# bug that makes many training scripts hang. The next cell stops the ranks of this lesson.

# %%
ranks.stop()
