# ---
# jupyter:
#   course:
#     module: scaling
#     minutes: 20
# ---

# %% [markdown]
# # 05 · Scaling
#
# **20 minutes.** You will be able to
#
# - measure the efficiency of a training step on several ranks, and tell what communication costs from what shared cores
#   cost,
# - compute how 4 ranks, 64 or 512 will scale, and when a speed-up of 7.2 on 8 ranks is possible,
# - train on ranks that have different numbers of batches.
#
# You need chapter 01 (α, β and the ring) and chapter 04 (`OverlappedDDP` and what stays exposed).

# %% [markdown]
# ## Where we are
#
# In chapter 04 you hid the all-reduces behind backward, and predicted how much of the communication stays exposed on
# four ranks. Is that the price for any number of ranks? This chapter measures a step on 1, 2 and 4 ranks, and computes
# it for up to 512.
#
# As in chapter 04, each rank gets a host of its own behind a link of 1 Gbit/s. Where this machine cannot make such
# hosts, the link is emulated.

# %% tags=["nbval-ignore-output"]
from shared import formulas, hosts, plots, ranks, tables
from shared.plots import scaling as scaling_plots

why_not = hosts.why_not()
link = None if why_not else "1gbit"
ranks.start(world_size=4, backend="gloo:cpu", detect_mismatch=False, link=link)
print(why_not or "The links are real: the kernel keeps their rate.")

# %% tags=["nbval-ignore-output"]
# %%ranks
import contextlib
import os
import time

from shared import hosts
from shared.hosts import emulated

emulation = contextlib.ExitStack()
if hosts.HOST_FILE not in os.environ:  # this rank has no host of its own
    emulation.enter_context(emulated.link("1gbit", latency_ms=0.1))

# %% [markdown]
# β is given, 8 ns per byte. The next cell measures α: an all-reduce of one element has 2(N−1) = 6 steps.


# %%
# %%ranks
def fastest_all_reduce_s(rounds):
    """Return the time of the fastest of some all-reduces of one element."""
    tensor, times = torch.zeros(1, device=device), []
    for _ in range(rounds):
        dist.barrier()
        began_s = time.perf_counter()
        dist.all_reduce(tensor)
        tensor.item()
        times.append(time.perf_counter() - began_s)
    return min(times)


one_element_s = fastest_all_reduce_s(rounds=40)

# %% tags=["nbval-ignore-output"]
alpha_s, beta_s = max(ranks.pull("one_element_s")) / (2 * 3), 8 / 1e9
print(f"α = {1e6 * alpha_s:.0f} µs, β = {1e9 * beta_s:g} ns per byte")

# %% [markdown]
# The model is chapter 04's: a GPT of which each block sleeps for 8 ms in forward and 16 ms in backward. It stands in
# for a device that computes without taking one of this machine's cores.


# %%
# %%ranks
class OnDevice(torch.autograd.Function):
    """Stands in for an accelerator: time passes, and no core is used."""

    @staticmethod
    def forward(ctx, output):
        time.sleep(0.008)
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.016)
        return gradient


# %%
# %%ranks
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.overlapped_ddp import OverlappedDDP

text = CharTokens()
text.tokens = text.tokens.to(device)
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
sample = text.windows([1000 * rank], length=16)


def on_device():
    """Build a model whose blocks sleep."""
    model = TinyGPT(config).to(device)
    for block in model.blocks:
        block.register_forward_hook(lambda block, inputs, output: OnDevice.apply(output))
    return OverlappedDDP(model, bucket_cap_mb=2.0)


def on_cores():
    """Build a model that computes on this machine's cores only."""
    return OverlappedDDP(TinyGPT(config).to(device), bucket_cap_mb=2.0)


# %% [markdown]
# ## Scaling, measured
#
# In **weak scaling**, every rank gets its own sample, on 1, 2 or 4 ranks. If nothing were lost, a step would take as
# long on four ranks as on one. The **efficiency** is $T_1 / T_N$, and it has two factors:
#
# $$\frac{T_1}{T_N} = \frac{T_1}{T_{N,\text{ no sync}}} \cdot \frac{T_{N,\text{ no sync}}}{T_N}$$
#
# The second factor is what communication costs: chapter 04 compared a step with the same step inside `no_sync()`. The
# first factor should be 1, because without communication no rank waits for another.
#
# **Predict** the second factor for 4 ranks. (1 means that communication costs nothing.)

# %%
my_prediction = 0.0


# %%
# %%ranks
several = text.windows(range(1000 * rank, 1000 * rank + 600, 100), length=64)


def step_ms(model, sends=True, batch=sample):
    """Time a step, from a moment at which all ranks are ready."""
    model.zero_grad()
    with contextlib.nullcontext() if sends else model.no_sync():
        dist.barrier()
        began_s = time.perf_counter()
        model(*batch).backward()
        model.finish_gradient_sync()
        return 1e3 * (time.perf_counter() - began_s)


def fastest_ms(kinds, rounds):
    """Take kinds of step in turn. Returns the time of each in its fastest round."""
    times_ms = [[step_ms(*kind) for kind in kinds] for _ in range(rounds)]
    return [min(times) for times in zip(*times_ms, strict=True)]


def quiet_loud_and_on_cores():
    model, cores = on_device(), on_cores()
    quiet_and_loud = fastest_ms([(model, False), (model, True)], rounds=9)
    return [*quiet_and_loud, *fastest_ms([(cores, False, several)], rounds=9)]


# %% tags=["nbval-ignore-output"]
import os

at = {}
for n in (1, 2, 4):
    with ranks.world(n):
        of_ranks = ranks.run(lambda: quiet_loud_and_on_cores())[:n]
    at[n] = [max(times) for times in zip(*of_ranks, strict=True)]  # the slowest rank's
rows = []
for n, (quiet, loud, cores) in at.items():
    shares = [f"{quiet / loud:.0%}", f"{at[1][0] / loud:.0%}"]
    rows.append([f"{n}", f"{quiet:.0f}", f"{loud:.0f}", *shares, f"{cores:.0f}"])
print(f"predicted {my_prediction:.0%}, measured {rows[-1][3]}")
header = ["ranks", "no sync, ms", "step, ms", "2nd factor", "efficiency"]
note = f"on cores: six samples, no sleeping and no communication; there are {os.cpu_count()} cores"
tables.Table([*header, "on cores, ms"], rows, note)

# %% [markdown]
# The last column is a warning. Nothing was sent there, and still a step takes longer on ranks that share cores than on
# one rank alone. The network is not to blame, and no bucket helps. If you take $T_1/T_N$ of such a run for the cost of
# communication, you have measured the cores. The baseline that does not mislead is the same step *without
# communication, on the same number of ranks*.

# %% [markdown]
# ## Scaling, computed
#
# Chapter 04 predicted the end of each bucket from the time at which it is ready and the time that its all-reduce takes.
# The ready times come from a run. The formula of the ring gives the all-reduces' times for any number of ranks. So we
# can carry the prediction to ranks that we do not have. First, record some steps:


# %%
# %%ranks
from shared import timeline


def recorded_step(model):
    model.zero_grad()
    dist.barrier()
    with timeline.record(model) as line:
        model(*sample).backward()
        model.finish_gradient_sync()
    return line


model = on_device()
lines = [recorded_step(model) for _ in range(12)]

# %%
from types import SimpleNamespace


def seen(lines):
    """Return one step as all its ranks saw it, in seconds since it began."""
    began_s = min(line.began_s for line in lines)
    collectives = [[s for s in line.spans if s.lane == "communication"] for line in lines]
    backward = [s.ended_s for line in lines for s in line.spans if s.lane == "backward"]
    buckets = list(zip(*collectives, strict=True))
    return SimpleNamespace(
        ready_s=[max(s.began_s for s in bucket) - began_s for bucket in buckets],
        sizes_bytes=[each.payload_bytes for each in collectives[0]],
        backward_end_s=max(backward) - began_s,
        end_s=max(s.ended_s for s in buckets[-1]) - began_s,
    )


# %% [markdown]
# `calm` is the step that was disturbed least. The next cell computes this step for other numbers of ranks and other
# links.


# %%
steps = [seen(of_step) for of_step in zip(*ranks.pull("lines"), strict=True)]
calm = min(steps[1:], key=lambda each: each.end_s)  # without the first


def computed_s(world_size, overlap=True, share=1.0, link=(alpha_s, beta_s)):
    """Compute a step's time, if each rank computes the given share of what a rank did above."""
    end_s = share * calm.backward_end_s
    ready_s = [share * s if overlap else end_s for s in calm.ready_s]
    costs_s = [formulas.ring_all_reduce_s(size, world_size, *link) for size in calm.sizes_bytes]
    return end_s + formulas.exposed_s(ready_s, costs_s, end_s)


def efficiency(world_size, share=1.0, **options):
    """Compute the part of N ranks' computing time that is not lost."""
    return computed_s(1) / (computed_s(world_size, share=share, **options) / share)


# %% [markdown]
# In **strong scaling**, all ranks share one batch: each of N ranks computes 1/N of it, but sends as many bytes as
# before. **Predict** the efficiency of both kinds of scaling for 64 ranks on this link, before you run the cell after
# the next. (1 means that nothing is lost.)

# %%
my_weak, my_strong = 0.0, 0.0

# %% tags=["nbval-ignore-output"]
sizes = [2**k for k in range(10)]
fast_link = alpha_s / 20, beta_s / 100
panels = {}
for title, link in {"this link": (alpha_s, beta_s), "β/100, α/20": fast_link}.items():
    panels[title] = {
        "weak, overlapped": {n: efficiency(n, link=link) for n in sizes},
        "weak, after backward": {n: efficiency(n, link=link, overlap=False) for n in sizes},
        "strong, overlapped": {n: efficiency(n, link=link, share=1 / n) for n in sizes},
    }
marks = {title: {"commonly claimed": {2: 1.9 / 2, 4: 3.7 / 4, 8: 7.2 / 8}} for title in panels}
marks["this link"]["weak, overlapped, measured"] = {n: at[n][0] / at[n][1] for n in (2, 4)}
weak, strong = panels["this link"]["weak, overlapped"], panels["this link"]["strong, overlapped"]
print(f"64 ranks, weak: predicted {my_weak:.0%}, computed {weak[64]:.0%}")
print(f"64 ranks, strong: predicted {my_strong:.0%}, computed {strong[64]:.0%}")
assert strong[64] < weak[64] < weak[2]
scaling_plots.efficiency(panels, marks)

# %% [markdown]
# Squares are the measurements from above. They lie below their line because sending needs cores as well. The right
# panel shows the same run behind a link with a hundredth of the β and a twentieth of the α. Why do all lines fall? Look
# at what N does to the two terms of the formula:

# %% tags=["nbval-ignore-output"]
rows = []
for n in (2, 8, 64, 512):
    bytes_ms = 1e3 * formulas.ring_all_reduce_s(sum(calm.sizes_bytes), n, 0, beta_s)
    latency_ms = 1e3 * 2 * (n - 1) * alpha_s
    times_ms = (bytes_ms, len(calm.sizes_bytes) * latency_ms, latency_ms)
    rows.append([f"{n}", *(f"{ms:.0f}" for ms in times_ms)])
tables.Table(["ranks", "bytes, ms", "latency, 7 buckets, ms", "latency, 1 bucket, ms"], rows)

# %% [markdown]
# - **Bytes** level off at 2S: from 8 ranks to any number they grow by a seventh.
# - **Latency** does not level off: it is 2(N−1)α for each bucket. So with few ranks, small buckets are better, because
#   they can be launched early. With many ranks, large buckets are better (DDP's default is 25 MB), or a tree, whose
#   latency is 2⌈log₂N⌉α (chapter 01).
# - In strong scaling there is also less and less backward behind which communication can hide.
#
# Speed-ups of 1.9, 3.7 and 7.2 on 2, 4 and 8 GPUs are commonly claimed, without a source that measured them. When would
# they be true?

# %%
for n, speed_up in {2: 1.9, 4: 3.7, 8: 7.2}.items():
    wanted = speed_up / n
    print(f"{speed_up} on {n}: efficiency {wanted:.1%}, exposed / compute {1 / wanted - 1:.1%}")


# %% tags=["nbval-ignore-output"]
def slowest_link(world_size, wanted, overlap):
    """Return the lowest rate that gives the run above this efficiency."""
    for gbit in (0.1 * 1.02**k for k in range(500)):
        link = alpha_s, 8e-9 / gbit
        if efficiency(world_size, overlap=overlap, link=link) >= wanted:
            return f"{gbit:.1f} Gbit/s"
    return "none: α alone costs more"


rows = [
    [f"{speed_up} on {n}", *(slowest_link(n, speed_up / n, overlap) for overlap in (True, False))]
    for n, speed_up in {2: 1.9, 4: 3.7, 8: 7.2}.items()
]
tables.Table(["speed-up", "overlapped, from", "after backward, from"], rows)

# %% [markdown]
# So such a speed-up is not a property of data parallelism. The same program has it on one link and misses it on
# another, or reaches it with a batch twice as large. What counts is exposed / compute. (Li et al., VLDB 2020, report
# near-linear scaling on 256 GPUs, "when configured appropriately".)

# %% [markdown]
# ## Ranks with different numbers of batches
#
# All of this assumes that every rank has as much to do as the others. But a data set rarely divides evenly, and then
# some ranks have a batch more. The ranks that have finished would leave the loop, and the others would wait for them in
# their next backward: that is chapter 00's hang. torch's DDP has a context manager for this, `join()`. A rank that has
# finished keeps taking part in the all-reduces, with zeros. In the next cell, rank r has r + 1 batches:

# %%
# %%ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import wire

ddp = DistributedDataParallel(nn.Linear(8, 1).to(device))
with wire.ledger() as log, ddp.join():
    for _ in range(rank + 1):
        ddp(torch.ones(2, 8, device=device)).sum().backward()
buckets = sum(entry.op == "all_reduce" and entry.elements == 9 for entry in log.entries)
print(f"batches: {rank + 1}, buckets sent: {buckets}")

# %% [markdown]
# ## Recap
#
# S bytes of gradients in b buckets, N ranks, a ring over links with latency α and bandwidth 1/β.
#
# | | computed per rank | bytes, seconds | latency, seconds | from 8 ranks to 512 |
# |---|---|---|---|---|
# | weak scaling | as on one rank | 2(N−1)/N · Sβ | 2(N−1)αb | the bytes grow by a seventh, the latency by 73 times |
# | strong scaling | 1/N of it | 2(N−1)/N · Sβ | 2(N−1)αb | the same, and 1/64 of the backward to hide behind |
#
# The terms of this chapter: **weak scaling** gives each rank a batch of its own, **strong scaling** shares one batch,
# and the **efficiency** is the part of the ranks' computing time that is not lost.

# %% [markdown]
# ## What is still wasted
#
# Time on the wire is one limit of data parallelism. The other one is **memory**:

# %%
# %%ranks
from shared import memory

model = on_cores()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model(*sample).backward()
model.finish_gradient_sync()
optimizer.step()
held = memory.held(model, optimizer)

# %%
held = {f"rank {number}": each.by_component() for number, each in enumerate(ranks.pull("held"))}
assert len({str(each) for each in held.values()}) == 1
plots.memory_by_component(held)

# %% [markdown]
# There are four copies of everything, equal to the last element, and training needs only one. Chapter 06 counts what a
# rank holds. From chapter 07 on, the ranks share it.
#
# But first, in the lab, you measure what communication costs your own wrapper and torch's.

# %%
ranks.stop()
