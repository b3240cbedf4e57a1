# ---
# jupyter:
#   course:
#     module: scaling
#     minutes: 35
# ---

# %% [markdown]
# # 05 · Scaling
#
# **35 minutes.** After this lesson, you will be able to:
#
# - measure how efficient data parallelism is on several ranks, and separate the cost of communication from the cost of
#   sharing cores,
# - build a cost model from a few measurements, and test it on cases that it has not seen,
# - predict the efficiency on 8, 64 or 512 GPUs from the latency and the bandwidth of a real link,
# - say when a speed-up of 7.2 on 8 GPUs is possible, and how a slow rank affects all others.
#
# You need α, β and the ring (chapter 01), and `OverlappedDDP`, exposed communication and `no_sync()` (chapter 04).

# %% [markdown]
# ## Where we are
#
# Your wrapper from chapter 04 hides part of its communication behind backward. Exposed communication is what is left:
# the time during which a rank waits for the network and has nothing to compute.
#
# So far, you have seen this on four ranks. How much faster will your training be on 64 GPUs? This chapter answers that
# without the GPUs. Each rank is behind a link of 1 Gbit/s, real or emulated.

# %% tags=["nbval-ignore-output"]
from shared import formulas, measure, plots, ranks, tables
from shared.plots import scaling as scaling_plots

measure.start_behind_link(world_size=4, rate="1gbit", latency_ms=0.1)

# %% [markdown]
# ## One definition of efficiency
#
# There are two ways to use more ranks:
#
# - In **weak scaling**, every rank has its own batch of a fixed size, so N ranks process N times as many samples per
#   step. If nothing were lost, a step would take as long as on one rank.
# - In **strong scaling**, the ranks share one batch, and each processes 1/N of it. If nothing were lost, a step would
#   take 1/N of the time.
#
# The **speed-up** is the number of samples per second on N ranks, divided by that on one rank. The **efficiency** is
# the speed-up divided by N, so an efficiency of 1 means that nothing is lost. If a step on N ranks takes $T_N$, the
# efficiency is $T_1 / T_N$ in weak scaling and $T_1 / (N \cdot T_N)$ in strong scaling.
#
# The efficiency is the product of two factors. Let $C_N$ be the time of the same step on the same N ranks, but without
# communication (inside `no_sync()`). In weak scaling:
#
# $$\frac{T_1}{T_N} = \underbrace{\frac{T_1}{C_N}}_\text{computation} \cdot
# \underbrace{\frac{C_N}{T_N}}_\text{communication}$$
#
# The second factor shows what communication costs. The first one should be 1, because ranks that do not communicate
# should not slow each other down. (In strong scaling, the first factor is $T_1 / (N \cdot C_N)$.)
#
# We train the GPT from chapter 04. As a stand-in for a GPU, each of its six blocks sleeps for 16 ms in forward and
# 32 ms in backward.

# %%
# %%ranks
from shared import measure
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu
from solutions.overlapped_ddp import OverlappedDDP

text = CharTokens()
text.tokens = text.tokens.to(device)
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
sample = text.windows([1000 * rank], length=16)  # short, so that the step is mostly sleep


def sleeping_ddp(share=1.0):
    """Build a wrapped model whose blocks sleep for a share of the full time."""
    model = TinyGPT(config).to(device)
    stand_in_for_gpu(model.blocks, forward_ms=16 * share, backward_ms=32 * share)
    return OverlappedDDP(model, bucket_cap_mb=2.0)


def times_of(model, batch=sample):
    """Time a step with communication and the same step without it."""
    step, alone = (measure.training_step(model, *batch, sync=sync) for sync in (True, False))
    return measure.jobs({"step": step, "without communication": alone}, rounds=9)


# %% [markdown]
# ## Weak scaling, measured
#
# **Predict.** The model has 10.8 MB of gradients in seven buckets, the link needs 8 ns per byte, and the blocks sleep
# for 288 ms per step. On 4 ranks, what will the communication factor be? (1 means that communication costs nothing.)

# %%
my_prediction = 0.0


# %%
# %%ranks
def weak_steps():
    return times_of(sleeping_ddp())


# %% tags=["nbval-ignore-output"]
weak = measure.scaling("weak_steps", counts=(1, 2, 4), timeout_s=200)
print(f"predicted {my_prediction:.0%}, measured {weak.communication(4):.0%}")
exposed_ms = 1e3 * (weak.step_s(4) - weak.without_communication_s(4))
print(f"On 4 ranks, communication makes the step {exposed_ms:.0f} ms longer.")
measure.expect(0 < exposed_ms < 110, "it is 0 to 110 ms longer")
weak

# %% [markdown]
# On 4 ranks, the bytes alone take about 130 ms on the link, but communication lengthens the step by less than that. The
# rest is hidden.
#
# Now run the same model without the sleep. Each rank computes three longer samples on this machine's cores. Look at
# the column "computation".

# %%
# %%ranks
several = text.windows(range(1000 * rank, 1000 * rank + 300, 100), length=64)


def steps_on_cores():
    return times_of(OverlappedDDP(TinyGPT(config).to(device), bucket_cap_mb=2.0), several)


# %% tags=["nbval-ignore-output"]
import os

on_cores = measure.scaling("steps_on_cores", timeout_s=200)
print(f"This machine has {os.cpu_count()} cores for 4 ranks.")
on_cores

# %% [markdown]
# On a machine with fewer cores than ranks, "computation" falls far below 100%: even when nothing is sent, the ranks
# take turns on the cores. ("Communication" is low, too: these steps are short, so backward hides less, and sending
# competes for the same cores.) If you only looked at $T_1 / T_N$, you would blame the network for everything. Always
# compare with the same step *without communication, on the same number of ranks*.

# %% [markdown]
# ## Strong scaling, measured
#
# In strong scaling, each of N ranks computes 1/N of the batch, so its blocks sleep for 1/N of the time. The gradients
# are as large as before.
#
# **Predict.** What will the efficiency of strong scaling be on 4 ranks? (1 means that nothing is lost.)

# %%
my_prediction = 0.0


# %%
# %%ranks
def strong_steps():
    return times_of(sleeping_ddp(share=1 / dist.get_world_size()))


# %% tags=["nbval-ignore-output"]
strong = measure.scaling("strong_steps", kind="strong", timeout_s=200)
print(f"predicted {my_prediction:.0%}, measured {strong.efficiency(4):.0%}")
measure.expect(strong.efficiency(4) < weak.efficiency(4), "strong scaling is less efficient")
strong

# %% [markdown]
# Strong scaling is harder. A rank computes less, but it sends as many bytes as before, and its shorter backward can
# hide less. ("Computation" falls as well, because only the sleep becomes shorter, not the real computation.)

# %% [markdown]
# ## A cost model
#
# A **cost model** is a formula that predicts the time of a step from a few measured numbers. Ours needs three things:
#
# 1. The link: α, the latency of a message (one step of the ring), and β, the time per byte. We fit both to the times of
#    all-reduces.
# 2. The computation: how long a step takes without communication (from the tables), and after which fraction of it each
#    bucket is ready ("full" in chapter 04). We take these fractions from a recorded step.
# 3. Chapter 04's formula for overlap: bucket i completes at $e_i = \max(e_{i-1}, \text{ready}_i) + t_i$, where $t_i$ is
#    the time of its all-reduce. The time from the end of backward until the last bucket completes is exposed (0 if it
#    completes earlier).
#
# For the link, we time all-reduces of five sizes, fit α and β to three of them, and keep two for a test:

# %%
# %%ranks
fit_sizes, test_sizes = (400, 40_000, 4_000_000), (1_000_000, 10_000_000)
fitted = measure.collectives({"all-reduce": dist.all_reduce}, fit_sizes)
unseen = measure.collectives({"all-reduce": dist.all_reduce}, test_sizes)

# %% tags=["nbval-ignore-output"]
link_fit = ranks.pull("fitted")[0].fit("all-reduce", sends="ring all-reduce")
alpha_s, beta_s = link_fit.alpha_s, link_fit.beta_s_per_byte
link_fit

# %% [markdown]
# Most of α is gloo's own work in each step, not the link's latency. For large tensors, gloo does this work while the
# link sends, so it costs no extra time. The formula adds it anyway, and the fit may make up for that with a β that is
# too small.
#
# For the computation, we record a step, and read from its timelines when each bucket was launched. A bucket counts as
# ready when it is ready on *all* ranks. We keep these times as fractions of the computation.

# %%
# %%ranks
from shared import timeline

model = sleeping_ddp()
to_record = {"weak": measure.training_step(model, *sample)}
lines = measure.recorded(to_record, lambda: timeline.record(model), rounds=9)["weak"]

# %% tags=["nbval-ignore-output"]
lines = ranks.pull("lines")[0]  # one step, as each of the four ranks saw it
began_s = min(line.began_s for line in lines)
computed_s = max(ended_s for line in lines for _, ended_s in line.lane("backward")) - began_s
in_flight = [[span for span in line.spans if span.lane == "communication"] for line in lines]
buckets = []
for spans in zip(*in_flight, strict=True):  # one bucket, on all ranks
    ready = (max(span.began_s for span in spans) - began_s) / computed_s
    buckets.append((ready, spans[0].payload_bytes))
    print(f"ready after {ready:.0%} of the computation: {buckets[-1][1] / 1e6:.2f} MB")

# %% [markdown]
# In the cost model, `alone_s` is the time of the step without communication. Without `overlap`, all buckets wait for
# the end of backward.


# %%
def predicted_s(world_size, alone_s, overlap=True):
    """Predict the time of a step on any number of ranks, behind this link."""
    ready_s = [alone_s * ready if overlap else alone_s for ready, _ in buckets]
    link = world_size, alpha_s, beta_s
    costs_s = [formulas.ring_all_reduce_s(size, *link) for _, size in buckets]
    return alone_s + formulas.exposed_s(ready_s, costs_s, alone_s)


# %% [markdown]
# ## Testing the cost model on held-out cases
#
# A formula with enough fitted numbers can match any measurements, and ours fits two numbers to three sizes. So we test
# it on **held-out cases**: measurements that were not used for the fit. We have six of them: two all-reduces, and the
# steps on 2 and 4 ranks in weak and strong scaling. (We recorded one of these steps, but the cost model never sees how
# long it took.) For each step, the cost model gets the time without communication, and adds the exposed time.
#
# **Predict.** By what factor will the worst prediction of a step be off? (1 means that it is exact.)

# %%
my_prediction = 0.0

# %% tags=["nbval-ignore-output"]
cases = {}
for size, measured_s in ranks.pull("unseen")[0].measured_s["all-reduce"].items():
    predicted = formulas.ring_all_reduce_s(size, 4, alpha_s, beta_s)
    cases[f"all-reduce of {size / 1e6:g} MB, 4 ranks"] = 0.0, predicted, measured_s
for scaling in (weak, strong):
    for n in (2, 4):
        alone_s = scaling.without_communication_s(n)
        case = alone_s, predicted_s(n, alone_s), scaling.step_s(n)
        cases[f"step, {scaling.kind} scaling, {n} ranks"] = case
off = {name: max(case[1] / case[2], case[2] / case[1]) for name, case in cases.items()}
worst_step = max(factor for name, factor in off.items() if name.startswith("step"))
ignored = max(measured / alone_s for alone_s, _, measured in cases.values() if alone_s)
print(f"predicted {my_prediction:.2f}, the worst step is off by a factor of {worst_step:.2f}")
print(f"if you ignored communication, it would be {ignored:.2f}")
measure.expect(worst_step < ignored, "the cost model is better than none")
rows = [
    [name, *(f"{1e3 * s:.0f}" if s else "–" for s in case), f"{off[name]:.2f}"]
    for name, case in cases.items()
]
header = ["case, in ms", "without communication", "predicted", "measured", "off by a factor of"]
tables.Table(header, rows)

# %% [markdown]
# There are two reasons for the errors. The formula adds gloo's own work in full, so it tends to overestimate medium
# sizes, such as 1 MB. And sending needs cores, so large all-reduces and backward tend to take longer than predicted.

# %% [markdown]
# ## Predicting the efficiency on more ranks
#
# **Predict.** Behind this link, what will be the efficiency of weak scaling and of strong scaling on 64 ranks? (1 means
# that nothing is lost. Each of the seven buckets takes 2(N−1) steps, and each step at least α.)

# %%
my_weak, my_strong = 0.0, 0.0

# %% [markdown]
# The figure shows the predicted efficiency against the number of ranks. The marks are your measurements. Look at the
# gain from overlap, and at the gap between weak and strong scaling. On 2 ranks, the mark for strong scaling lies below
# its line, because only the sleep of our steps shrinks to 1/N. On 4 ranks, this matters less: the link is busy almost
# from the first bucket on. (The times vary by 10 to 20 ms from run to run, so each mark may also be off by a few
# percent.)

# %% tags=["nbval-ignore-output"]
counts = [2**k for k in range(10)]
compute_s = weak.without_communication_s(1)
curves = {
    "weak, overlapped": {n: compute_s / predicted_s(n, compute_s) for n in counts},
    "weak, without overlap": {
        n: compute_s / predicted_s(n, compute_s, overlap=False) for n in counts
    },
    "strong, overlapped": {n: compute_s / n / predicted_s(n, compute_s / n) for n in counts},
}
marks = {
    "weak, measured": {n: weak.efficiency(n) for n in (2, 4)},
    "strong, measured": {n: strong.efficiency(n) for n in (2, 4)},
}
weak_64, strong_64 = curves["weak, overlapped"][64], curves["strong, overlapped"][64]
print(f"64 ranks, weak: predicted {my_weak:.0%}, by the cost model {weak_64:.0%}")
print(f"64 ranks, strong: predicted {my_strong:.0%}, by the cost model {strong_64:.0%}")
measure.expect(strong_64 < weak_64 < curves["weak, overlapped"][2], "weak scaling is better")
measure.expect(strong.efficiency(2) < curves["strong, overlapped"][2], "a mark is below its line")
overlap_helps = curves["weak, without overlap"][4] < curves["weak, overlapped"][4]
measure.expect(overlap_helps, "overlap makes scaling more efficient")
scaling_plots.efficiency({"1 Gbit/s": curves}, {"1 Gbit/s": marks})

# %% [markdown]
# Why does the efficiency fall even in weak scaling, although no rank ever sends more than twice the size of the
# gradients? Look at the two terms of the ring's formula:
#
# - The bytes level off: each rank sends 2(N−1)/N · S, at most 2S. From 8 ranks to 512, this grows by 14%.
# - The latency does not: each bucket costs 2(N−1)α. From 8 ranks to 512, this grows by a factor of 73.
#
# So the best bucket cap grows with the number of ranks: the more latency costs, the more it helps to have fewer
# buckets, although they are launched later.

# %% [markdown]
# ## Real links
#
# A link of 1 Gbit/s is slow, and most of our α comes from gloo. The table lists links between real GPUs. The bus
# bandwidth (chapter 01) is the one that programs achieve, not the one in the data sheet, and α is again the latency of
# one step, here of NCCL's ring. The last column is the time of an all-reduce of 1 GB on the number of GPUs in the
# column before it. (Unless the name says otherwise, a host has one GPU.)

# %%
from shared.planner.links import REAL_LINKS, link_table

link_table()

# %% [markdown]
# Such links deserve a larger model:
#
# | quantity | value |
# |---|---|
# | a GPT with 1.3 billion parameters | 2.6 GB of gradients in bf16 |
# | operations per parameter and token | about 6, a third of them in forward (Kaplan et al., 2020) |
# | operations per second of an H100 | up to 989 · 10¹² in bf16, without sparsity (NVIDIA's data sheet) |
# | of these, used in training | 40% (38 to 43% for Llama 3: Grattafiori et al., 2024) |
# | tokens per GPU and step | 8,192, so a step computes for about 160 ms |
#
# We assume that the gradients become ready at a steady rate during backward, in 100 buckets (`bucket_cap_mb=25`).


# %%
import math

PARAMETERS, GRADIENT_BYTES = 1.3e9, 2.6e9
OPERATIONS_PER_S = 0.4 * 989e12
BUCKETS = math.ceil(GRADIENT_BYTES / (25 * 2**20))


def gpt_efficiency(link, gpus, all_reduce_s=formulas.ring_all_reduce_s, tokens=8192):
    """Predict the efficiency of weak scaling for the GPT with 1.3 billion parameters."""
    compute_s = 6 * PARAMETERS * tokens / OPERATIONS_PER_S
    # Forward is the first third, backward the rest.
    ready_s = [compute_s * (1 + 2 * number / BUCKETS) / 3 for number in range(1, BUCKETS + 1)]
    cost_s = all_reduce_s(GRADIENT_BYTES / BUCKETS, gpus, link.alpha_s, link.beta_s_per_byte)
    return compute_s / (compute_s + formulas.exposed_s(ready_s, [cost_s] * BUCKETS, compute_s))


# %% [markdown]
# A ring has 2(N−1) steps, which add up to a lot of latency on 512 GPUs. NCCL can also use trees, whose latency grows
# only with the logarithm of N (Jeaugey, 2019). We estimate their times with the formula of halving and doubling
# (chapter 01), which sends as many bytes as the ring, but in 2 log₂N steps.
#
# **Predict.** What efficiency do you expect on 64 hosts with one GPU each, over InfiniBand at 400 Gbit/s, with the
# ring? (1 means that nothing is lost.)

# %%
my_prediction = 0.0

# %% tags=["nbval-ignore-output"]
logarithmic = formulas.halving_doubling_all_reduce_s
links, rows = {link.name: link for link in REAL_LINKS}, []
for name, link in links.items():
    reachable = (8,) if name.startswith("NVLink") else (8, 64, 512)
    ring = [gpt_efficiency(link, n) for n in reachable]
    trees = [gpt_efficiency(link, n, logarithmic) for n in reachable]
    assert ring == sorted(ring, reverse=True) and ring[-1] <= trees[-1]
    cells = [f"{r:.0%} / {t:.0%}" for r, t in zip(ring, trees, strict=True)]
    rows.append([name, *cells, *["–"] * (3 - len(cells))])
infiniband = links["InfiniBand, 1 adapter of 400 Gbit/s per host"]
print(f"predicted {my_prediction:.0%}, by the cost model {gpt_efficiency(infiniband, 64):.0%}")
note = "Efficiency with a ring / with logarithmic latency. NVLink connects GPUs of one host only."
tables.Table(["link", "8 GPUs", "64 GPUs", "512 GPUs"], rows, note)

# %% [markdown]
# On 64 hosts, the latencies explain the prediction: 100 buckets · 126 steps · 14 µs are 176 ms, more than the whole
# computation. With 2 log₂64 = 12 steps, they would be 17 ms.
#
# The next figure shows three of these links. Compare the two lines in each panel. Where they are far apart, the problem
# is the latency, and larger buckets or trees help. Where both are low, it is the bandwidth, and only a faster link or
# more computation per byte helps.

# %% tags=["nbval-ignore-output"]
shown = {
    "8 adapters of 400 Gbit/s": links["8 H100 per host, 8 InfiniBand adapters of 400 Gbit/s"],
    "1 adapter of 400 Gbit/s": infiniband,
    "Ethernet, 100 Gbit/s": links["Ethernet with TCP, 100 Gbit/s"],
}
claimed = {2: 1.9 / 2, 4: 3.7 / 4, 8: 7.2 / 8}
panels = {}
for title, link in shown.items():
    trees = {n: gpt_efficiency(link, n, logarithmic) for n in counts}
    panels[title] = {
        "ring": {n: gpt_efficiency(link, n) for n in counts},
        "logarithmic latency": trees,
    }
label = "1.9×/3.7×/7.2× (widely quoted; we know of no source)"
scaling_plots.efficiency(panels, {title: {label: claimed} for title in panels})

# %% [markdown]
# (In the first panel, α is the mean over a ring's steps, of which seven in eight stay inside a host. In a tree, a
# larger share of the steps goes between hosts, but even 14 µs for every step would hardly lower the dashed line.)

# %% [markdown]
# ## When is a speed-up of 7.2 on 8 GPUs possible?
#
# Speed-ups of 1.9, 3.7 and 7.2 on 2, 4 and 8 GPUs are widely quoted, but we know of no source that has measured them.
# They are the marks in the figure above, at efficiencies of 95%, 92.5% and 90%. In weak scaling, the efficiency is the
# computing time divided by the sum of computing time and exposed time. So the exposed time may be at most 5%, 8% and
# 11% of the computing time.
#
# More tokens per GPU mean more computation for the same bytes. For each link, the next cell finds how many tokens per
# GPU and step our GPT needs to reach these speed-ups.


# %%
def tokens_needed(link, gpus, wanted):
    """Find the smallest power of two that gives this efficiency."""
    return next(2**k for k in range(6, 30) if gpt_efficiency(link, gpus, tokens=2**k) >= wanted)


rows = []
for name, link in links.items():
    needed = [tokens_needed(link, n, wanted) for n, wanted in claimed.items()]
    rows.append([name, *(f"{tokens:,}" for tokens in needed)])
header = ["link", *(f"{n * wanted:g} on {n}" for n, wanted in claimed.items())]
tables.Table(header, rows, "tokens per GPU and step")

# %% [markdown]
# So every link in the table allows these speed-ups, if the GPUs have enough to compute. Whenever you read about a
# speed-up, ask for the model, the batch per GPU and the link.

# %% [markdown]
# ## Stragglers and skew
#
# The cost model assumes that all ranks are equally fast. A **straggler** is a rank that is slower than the others, for
# instance because its GPU is throttled, its data loader is late or its samples are longer. The **skew** of a collective
# is the time between the first and the last rank that reach it. In the next cell, rank 3's blocks sleep twice as long.
#
# **Predict.** By what factor does the step of the other three ranks become longer? (1 means not at all.)

# %%
my_prediction = 0.0

# %%
# %%ranks
skewed = sleeping_ddp(share=2.0 if rank == 3 else 1.0)
steps = {
    "all ranks alike": measure.training_step(model, *sample),
    "rank 3 is a straggler": measure.training_step(skewed, *sample),
}
times = measure.jobs(steps, rounds=5)
straggling = {"": steps["rank 3 is a straggler"]}
lines = measure.recorded(straggling, lambda: timeline.record(skewed), rounds=3)[""]

# %% tags=["nbval-ignore-output"]
factor = ranks.pull("times")[0].ratio("rank 3 is a straggler", "all ranks alike")
print(f"predicted {my_prediction:.2f}, measured {factor:.2f}")
measure.expect(factor > 1.3, "all ranks wait for the straggler")
plots.timeline(ranks.pull("lines")[0])

# %% [markdown]
# Every step takes as long as the slowest rank needs. (The factor is below 2, because only the sleep doubles, not the
# real computation or the exposed communication.) In the timelines, ranks 0 to 2 finish backward long before rank 3, and
# wait for the all-reduces.
#
# With many ranks, this happens even without a broken GPU. Suppose that the computing time of each rank varies from step
# to step, with a standard deviation of 5% (normally distributed). The slowest of N ranks sets the pace:

# %%
import torch

torch.manual_seed(0)
slowest = {n: (1 + 0.05 * torch.randn(2000, n)).amax(dim=1).mean().item() for n in (1, 8, 64, 512)}
assert slowest[1] < slowest[8] < slowest[64] < slowest[512]
for n, factor in slowest.items():
    print(f"N = {n:3}: a step takes {factor:.3f} times as long, efficiency {1 / factor:.0%}")

# %% [markdown]
# In the extreme case, a rank has nothing left to compute. A data set rarely divides evenly, so some ranks may have one
# more batch than the others, and would hang once the others have left the loop. torch's DDP has a context manager for
# this, `join()`: a rank that has finished still takes part in the all-reduces, with zeros. In the next cell, rank r has
# r + 1 batches. Compare the two numbers that each rank prints:

# %%
# %%ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import wire

ddp = DistributedDataParallel(nn.Linear(8, 1).to(device))
with wire.ledger() as log, ddp.join():
    for _ in range(rank + 1):
        ddp(torch.ones(2, 8, device=device)).sum().backward()
sent = sum(entry.op == "all_reduce" and entry.elements == 9 for entry in log.entries)
print(f"batches: {rank + 1}, all-reduces of the bucket: {sent}")

# %% [markdown]
# Every rank takes part in all four all-reduces. In the last step, only rank 3 has samples, but its gradient is still
# divided by 4. With `divide_by_initial_world_size=False`, `join()` divides by the number of ranks that have a batch.

# %% [markdown]
# ## Why DDP replaced `nn.DataParallel`
#
# Before DDP, there was `nn.DataParallel`, which uses several GPUs with one line of code. torch still has it, but
# recommends DDP. The table compares one step of both:
#
# | | `nn.DataParallel` | DDP |
# |---|---|---|
# | processes | one, with a thread per GPU: the threads compete for Python's global lock | one per GPU |
# | before forward | broadcasts all parameters from GPU 0, and scatters the batch | broadcasts at most the buffers |
# | loss | on GPU 0, after gathering all outputs there | on every rank |
# | gradients | summed on GPU 0 after backward | all-reduced in buckets during backward |
# | optimizer | on GPU 0, while the other GPUs wait | on every rank |
# | several hosts | no | yes |
#
# With NCCL, the broadcast and the sum move about as many bytes as an all-reduce. The difference is the timing. No
# replica can start forward before it has all parameters. And autograd treats the broadcast of all parameters as one
# operation, whose backward is the sum, so the sum starts only when all gradients are ready. All of this communication
# is exposed. We can imitate this order. (gloo's broadcast and reduce take longer than NCCL's, so the figure
# exaggerates.)

# %%
# %%ranks
all_parameters = torch.zeros(sum(p.numel() for p in model.parameters()), device=device)


def in_the_order_of_data_parallel():
    dist.broadcast(all_parameters, src=0)
    with model.no_sync():
        model(*sample).backward()
    dist.reduce(all_parameters, dst=0)  # as many bytes as the gradients


ways = {
    "order of nn.DataParallel": measure.Job({"": in_the_order_of_data_parallel}, model.zero_grad),
    "OverlappedDDP": measure.training_step(model, *sample),
}
times = measure.jobs(ways, rounds=5)

# %% tags=["nbval-ignore-output"]
times = ranks.pull("times")[0]
measure.expect(
    times.ratio("order of nn.DataParallel", "OverlappedDDP") > 1, "OverlappedDDP is faster"
)
plots.bars(times.ms(), "ms per step (median of 5)")

# %% [markdown]
# ## Does a faster step mean faster training?
#
# Efficiency counts samples per second. But in weak scaling, N ranks also have a global batch that is N times as large,
# and a larger batch only helps if training then needs fewer steps. Let's train the digits MLP until it recognizes 90%
# of 297 test images, with 16 images per rank and step. A larger batch makes the gradient less noisy, but at the same
# learning rate, the steps do not become larger. The **linear scaling rule** therefore multiplies the learning rate by
# N, too (Goyal et al., 2017). Compare the last two columns.

# %%
# %%ranks
from torch.nn.functional import cross_entropy

from shared.data import digits
from shared.models import MLP

images, labels = (tensor.to(device) for tensor in digits())


def steps_to_90(scale_lr, most=3000):
    """Train on the current ranks. Returns the number of steps until 90% of the test images are right."""
    count = dist.get_world_size()
    generator = torch.Generator().manual_seed(0)  # all ranks draw the same global batch
    mlp = OverlappedDDP(MLP(seed=0).to(device))
    optimizer = torch.optim.SGD(mlp.parameters(), lr=0.1 * (count if scale_lr else 1))
    for step in range(1, most + 1):
        own = torch.randint(1500, (16 * count,), generator=generator)[rank::count]
        optimizer.zero_grad()
        cross_entropy(mlp(images[own]), labels[own]).backward()
        mlp.finish_gradient_sync()
        optimizer.step()
        if step % 10 == 0:
            with torch.no_grad():
                right = mlp.module(images[1500:]).argmax(dim=1) == labels[1500:]
            if right.float().mean() >= 0.9:
                return step
    return most


# %% tags=["nbval-ignore-output"]
steps, rows = {}, []
for n in (1, 2, 4):
    with ranks.world(n):
        for scale_lr in (False, True):
            steps[n, scale_lr] = ranks.run(
                lambda scale: steps_to_90(scale), scale_lr, timeout_s=100
            )[0]
    rows.append([f"{n}", f"{16 * n}", f"{steps[n, False]}", f"{steps[n, True]}"])
assert steps[4, False] > 0.75 * steps[1, False]
assert 0.4 < steps[2, True] / steps[1, False] < 0.65
assert 0.75 * steps[2, True] < steps[4, True] < 0.7 * steps[1, False]
tables.Table(["ranks", "global batch", "steps with lr 0.1", "steps with lr 0.1 · N"], rows)

# %% [markdown]
# With the same learning rate, four ranks need almost as many steps as one rank, although each step has four times as
# many samples. With the scaled learning rate, two ranks need about half as many, and four ranks only slightly fewer
# than that. The rule has a limit: beyond some batch size, more samples per step do not help (McCandlish et al., 2018).

# %% [markdown]
# ## On a cluster
#
# | question | here | with NCCL and many hosts |
# |---|---|---|
# | What are α and β? | `measure.collectives` | `NCCL_ALGO=Ring NCCL_PROTO=Simple all_reduce_perf -b 8 -e 1G -f 2` |
# | What does communication cost? | steps in `no_sync()` | the same, timed with CUDA events |
# | Which rank is slow? | `plots.timeline` | the one that waits *least*: `torch.profiler`, or the flight recorder |
# | Why is it slow? | shared cores | clocks (`nvidia-smi -q -d PERFORMANCE`), data loading, a bad cable |

# %% [markdown]
# ## Recap
#
# There are S bytes of gradients, b buckets and N ranks, and a ring over links with latency α and bandwidth 1/β:
#
# | | memory per rank | seconds for the bytes | seconds for the latency | overlap |
# |---|---|---|---|---|
# | weak scaling | as on one rank | 2(N−1)/N · Sβ | 2(N−1)αb | with a whole backward |
# | strong scaling | fewer activations | 2(N−1)/N · Sβ | 2(N−1)αb | with 1/N of a backward |
# | order of `nn.DataParallel` | GPU 0 holds more | NCCL: about 2Sβ | a broadcast and a reduce | none |
#
# **Terms**
#
# - **weak scaling**: every rank has its own batch of a fixed size, so N ranks process N times as many samples per step.
# - **strong scaling**: the ranks share one batch, so each of N ranks processes 1/N of it.
# - **speed-up**: the samples per second on N ranks, divided by those on one rank.
# - **efficiency**: the speed-up on N ranks, divided by N; 1 means that nothing is lost.
# - **cost model**: a formula that predicts the time of a step from a few measured numbers, such as α, β and the
#   computing time.
# - **held-out case**: a measurement that was not used to fit a model, and can therefore test it.
# - **straggler**: a rank that is slower than the others, which then wait for it in every collective.
# - **skew**: the time between the first and the last rank that reach a collective.
# - **linear scaling rule**: multiply the learning rate by the same factor as the global batch.
#
# The [glossary](glossary.md) has the terms of all chapters.

# %% [markdown]
# ## Further reading
#
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020 (arXiv 2006.15704).
#   The evaluation shows how the best bucket size and the scaling to 256 GPUs depend on the model and the backend.
# - Jeaugey, *Massively scale your deep learning training with NCCL 2.4* (NVIDIA developer blog, 2019). It shows how
#   trees keep the latency low on many GPUs.
# - Goyal et al., *Accurate, large minibatch SGD: training ImageNet in 1 hour*, 2017 (arXiv 1706.02677). It explains the
#   linear scaling rule and its limits.
# - Lin et al., *Understanding stragglers in large model training using what-if analysis*, OSDI 2025 (arXiv 2505.05713).
#   Many of the causes that it finds are not broken hardware.

# %% [markdown]
# ## What is still wasted
#
# Time on the wire is one limit of data parallelism. The other is *memory*. All ranks hold the same parameters, averaged
# gradients and optimizer state, although training needs each of them only once. More ranks do not help: a model that
# does not fit on one GPU does not fit on 512 of them. Chapter 06 counts the bytes that a rank holds, and from chapter
# 07 on, the ranks divide them among themselves.
#
# First, you write the cost model yourself in the lab.

# %%
ranks.stop()
