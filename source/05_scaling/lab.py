# ---
# jupyter:
#   course:
#     module: scaling
#     minutes: 25
# ---

# %% [markdown]
# # Lab 05 · Scaling
#
# **25 minutes, 3 points.** You measure what communication really costs: how much longer a step takes because of it.
# Then you compare your wrappers of labs 03 and 04 with torch's DDP.
#
# The exercise has a check. It passes its own clock to your function, so it can judge your measurement exactly.

# %% tags=["nbval-ignore-output"]
from shared import ranks, tables
from shared.checks import scaling as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Measuring how much of a training step is computation, and how much longer communication makes it."""

import statistics
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

# %% [markdown]
# ## Exercise 5.1 · What communication really costs (15 min, 3 points)
#
# The time that an all-reduce takes says little, because it may be hidden behind backward. What counts is how much
# *longer* a step takes because of communication. `communication_cost(model, loss_of, now_ms, rounds=10)` measures
# steps with and without communication, and returns the medians:
#
# ```python
# compute_ms = median(forward, backward, finish, inside no_sync)
# exposed_ms = median(the same outside) - compute_ms
# ```
#
# (The lesson took the fastest rounds, which show what the machine can do. Medians show what it usually does.)
#
# - Alternate between the two kinds of step. In each round, the step inside `no_sync()` comes first.
# - Measure `rounds` rounds, after one more round that warms up and does not count.
# - Each measurement starts on all ranks at once: call `dist.barrier()` before you read the clock.
# - All gradients are None when a measurement starts.
# - `loss_of(model)` runs forward and returns the loss. `now_ms()` reads the clock in milliseconds. (On a GPU, it first
#   waits until the GPU has finished.)
#
# Target: the clock is read right before forward and right after `finish_gradient_sync()`, in both kinds of step.
#
# <details><summary>Hint</summary>
#
# Both kinds of step consist of the same lines. Which part of them can be a function of its own, which you call once
# inside `no_sync()` and once outside?
# </details>


# %% tags=["exercise", "export"] grade_id="communication-cost"
# %%ranks
def communication_cost(
    model: nn.Module, loss_of: Callable, now_ms: Callable[[], float], rounds: int = 10
) -> tuple[float, float]:
    """Measure how long a step computes, and how much longer it takes because of communication.

    Args:
        model: A wrapper with finish_gradient_sync() and no_sync().
        loss_of: Runs forward and returns the loss: loss_of(model).
        now_ms: Reads the clock, in milliseconds.
        rounds: How many rounds count, after one more round that warms up.

    Returns:
        compute_ms, the median time of a step without communication, and exposed_ms, by how much the median step with
        communication is longer.
    """

    ### BEGIN SOLUTION
    def step_ms() -> float:
        model.zero_grad(set_to_none=True)
        dist.barrier()
        began_ms = now_ms()
        loss_of(model).backward()
        model.finish_gradient_sync()
        return now_ms() - began_ms

    without_sync_ms, with_sync_ms = [], []
    for _ in range(rounds + 1):
        with model.no_sync():
            without_sync_ms.append(step_ms())
        with_sync_ms.append(step_ms())
    compute_ms = statistics.median(without_sync_ms[1:])  # the first round warms up
    exposed_ms = statistics.median(with_sync_ms[1:]) - compute_ms
    return compute_ms, exposed_ms
    ### END SOLUTION


# %% tags=["check"] grade_id="check-communication-cost" points=3
check.communication_cost()

# %% [markdown]
# ## Your figure, and torch's answer (10 min)
#
# Compare `OverlappedDDP` with `BucketedDDP` and torch's DDP, on a GPT with 2.7 million parameters. Your function exists
# only on the ranks that are running now, so you keep them, and their link of 1 Gbit/s is *emulated*. (With NCCL, the
# ranks use their own links.) The check that all ranks call the same collective is switched off, because it costs time.


# %%
# %%ranks
import contextlib

from shared import memory, wire
from shared.data import CharTokens
from shared.hosts import emulated
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch
from solutions.overlapped_ddp import OverlappedDDP

mismatch.ignore()
link = contextlib.ExitStack()
if dist.get_backend() == "gloo":
    link.enter_context(emulated.link("1gbit", latency_ms=0.1))

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
samples = text.windows(range(1000 * rank, 1000 * rank + 600, 100), length=64)
inputs, targets = (tensor.to(device) for tensor in samples)


# %% [markdown]
# The next cell gives all three wrappers the same two methods, so that your function can measure each of them:


# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

from solutions.bucketed_ddp import BucketedDDP


class BucketedDDPWithNoSync(BucketedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        self.finish_gradient_sync = lambda: None
        yield
        del self.finish_gradient_sync


class TorchDDP(DistributedDataParallel):
    def finish_gradient_sync(self):
        """Do nothing, because backward() of torch's DDP waits for all buckets."""


models = {
    "BucketedDDP": BucketedDDPWithNoSync(TinyGPT(config).to(device), bucket_cap_mb=2.0),
    "OverlappedDDP": OverlappedDDP(TinyGPT(config).to(device), bucket_cap_mb=2.0),
    "torch's DDP": TorchDDP(
        TinyGPT(config).to(device), bucket_cap_mb=2.0, gradient_as_bucket_view=True
    ),
}


# %%
# %%ranks
def loss_of(model):
    return model(inputs, targets)


def step(model, optimizer):
    """Take a training step. Returns its loss and its ledger."""
    optimizer.zero_grad()
    with wire.ledger() as log:
        loss = loss_of(model)
        loss.backward()
        model.finish_gradient_sync()
    optimizer.step()
    return loss.item(), log


def train(model, steps=4):
    """Take some steps. Returns the last loss and ledger, and the peak memory of one more step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss, log = step(model, optimizer)
    with memory.peak(model, optimizer) as peak:
        step(model, optimizer)
    return loss, log, peak.peak_bytes


results = {name: train(model) for name, model in models.items()}

# %% [markdown]
# Your function measures how much communication stays exposed, and the ledger counts the bytes that were sent:


# %%
# %%ranks
import time


def now_ms():
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * time.perf_counter()


costs = {
    name: communication_cost(model, loss_of, now_ms, rounds=5) for name, model in models.items()
}

# %% tags=["nbval-ignore-output"]
rows, costs, losses, payloads_bytes = [], ranks.pull("costs"), [], set()
for name, (loss, log, peak_bytes) in ranks.pull("results")[0].items():
    losses.append(loss)
    payloads_bytes.add(log.payload_bytes)
    exposed_ms = max(0.0, *(rank_costs[name][1] for rank_costs in costs))
    early = sum(entry.in_backward for entry in log.entries)
    assert early == (0 if name == "BucketedDDP" else log.messages)
    row = [name, f"{loss:.4f}", f"{log.messages}", f"{early}", f"{log.sent_bytes / 1e6:.1f}"]
    rows.append([*row, f"{exposed_ms:.0f}", f"{peak_bytes / 1e6:.1f}"])
assert max(losses) - min(losses) < 1e-3 and len(payloads_bytes) == 1
header = ["", "loss", "all-reduces", "in backward", "sent, MB", "exposed, ms", "peak, MB"]
tables.Table(header, rows, "rank 0; exposed: the rank with the most exposed communication")

# %% [markdown]
# The losses are equal, and so are the bytes sent. Your wrapper leaves about as much exposed as torch's does, up to the
# noise of this machine. Neither of them saves anything in the last column: each of the four ranks holds all parameters,
# all gradients and the full optimizer state. Chapter 06 counts those bytes.

# %%
ranks.stop()
