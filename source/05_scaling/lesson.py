# ---
# jupyter:
#   course:
#     module: scaling
# ---

# %% [markdown]
# # 05 · Scaling
#
# **40–60 minutes.** After this lesson, you will be able to:
#
# - say whether data parallelism will keep your GPUs busy, before you rent them,
# - tell waiting for the network from ranks that share cores, and from one slow rank,
# - explain why weak scaling is easy, and where strong scaling ends,
# - predict how one slow rank or a larger batch changes a training.
#
# You need α, β and the ring (chapter 01), and `OverlappedDDP`, exposed communication and `no_sync()` (chapter 04).

# %% [markdown]
# ## A thousand tokens each
#
# Meta trained Llama 3 405B on 16,384 GPUs, with 16 million tokens in each step (Grattafiori et al., 2024, table 4).
# With data parallelism alone, every GPU would have had a thousand tokens on average, an eighth of a sequence, and then
# they would all have synchronized 405 billion gradients.
#
# Instead, they made 128 copies of the model, split each copy over 128 GPUs, and gave each copy 131,072 tokens per step.
# One reason is memory: 405 billion parameters do not fit on one GPU. But suppose that they did. Would a thousand tokens
# have been enough?
#
# After the next section, you can answer that in your head. The rest of the lesson tests the answer on ranks that you
# can start, and adds what it leaves out.

# %% tags=["nbval-ignore-output"]
from shared import formulas, measure, plots, ranks, tables
from shared.plots import scaling as scaling_plots

measure.start_behind_link(world_size=4, rate="1gbit", latency_ms=0.1)

# %% [markdown]
# The cell says whether the link is *shaped* (the kernel of this machine slows the packets down) or *emulated* (our own
# code delays each collective by the ring's formula). On an emulated link, the measurements below only test our
# bookkeeping. On a shaped link, the times are real.

# %% [markdown]
# ## What has to hide behind what
#
# In chapter 04, an all-reduce was hidden as long as backward was still running. So everything depends on which of the
# two takes longer.
#
# Training takes about 6 operations per parameter and token, and two thirds of them belong to backward (Kaplan et al.,
# 2020). Let P be the number of parameters, T the tokens of one backward on a GPU, and C the operations that it really
# computes per second. Then backward lasts
#
# $$t_\text{backward} = \frac{4\,P\,T}{C}.$$
#
# The other side is the all-reduce. A gradient in bf16 has 2 bytes, and a ring sends every byte almost twice (chapter
# 01). With a bus bandwidth of W bytes per second, it lasts
#
# $$t_\text{all-reduce} = \frac{2 \cdot 2\,P}{W}.$$
#
# The all-reduce is hidden if backward lasts at least as long. Write that down, and the model drops out:
#
# $$\frac{4\,P\,T}{C} \ge \frac{4\,P}{W} \qquad\Longleftrightarrow\qquad \boxed{\;T \ge \frac{C}{W}\;}$$
#
# Neither the size of the model nor the number of GPUs is left. In this simple picture, **data parallelism is free once
# every backward has C/W tokens per GPU.** A larger model computes longer and sends more, in the same proportion.
#
# **Predict.** An H100 can compute 989 · 10¹² operations per second in bf16 (NVIDIA's data sheet), and a good training
# uses about 40% of that. How many tokens per backward does it need behind an adapter of 400 Gbit/s, which reaches 47
# GB/s?

# %%
my_prediction = None  # tokens

# %%
from shared.planner.links import REAL_LINKS

H100 = 0.4 * 989e12  # operations per second
rows = []
for link in REAL_LINKS:
    if "A100" not in link.name:
        tokens = H100 / link.bus_bytes_per_s
        rows.append([link.name, f"{link.bus_bytes_per_s / 1e9:g} GB/s", f"{tokens:,.0f}"])
tables.Table(["link of an H100", "bus bandwidth W", "tokens per GPU, C/W"], rows)

# %% [markdown]
# A sequence of Llama 3 has 8,192 tokens. So one sequence per GPU is enough on the first three links, nearly enough on
# the fourth, and hopeless over TCP.
#
# So would a thousand tokens have been enough? Not quite, even with the best links in the table, and no sequence would
# have stayed whole. Splitting each copy of the model over 128 GPUs changes that. Each GPU then computes for 1/128 of
# the parameters and synchronizes 1/128 of the gradients, so the parameters drop out again. Only the tokens of the whole
# *copy* count: 131,072. The GPUs that average the same gradients sit in different hosts, each behind one adapter of 400
# Gbit/s, as in the fourth row, so a copy has sixteen times the tokens it needs. It splits them into micro-batches
# (chapter 15), but even a fully exposed all-reduce would make the step only 4% longer.
#
# In float32, a gradient has 4 bytes, so “sixteen times” becomes eight. Llama 3 was in between: it reduced gradients in
# float32, but gathered parameters in bf16 (Grattafiori et al., 2024, section 3.3.2; chapter 10).
#
# **Predict.** With 4,096 tokens per GPU behind one adapter of 400 Gbit/s, backward takes only half as long as the
# all-reduce. You may either double the batch or accumulate gradients over two micro-batches (chapter 02). Which one
# keeps the GPU busier?
#
# - A: both the same, because both process 8,192 tokens per all-reduce
# - B: the larger batch
# - C: accumulation

# %%
my_choice = None  # "A", "B" or "C"


# %%
def busy(tokens, needed, micro_batches=1):
    """Return for which part of a step a GPU computes. One unit of time is the backward of one micro-batch."""
    compute = 1.5 * micro_batches  # forward takes half as long as backward
    return compute / (compute + max(0, needed / tokens - 1))


for micro_batches, tokens in ((1, 4096), (1, 8192), (2, 4096)):
    part = busy(tokens, H100 / 47e9, micro_batches)
    print(f"{micro_batches} × {tokens:,} tokens: busy for {part:.0%} of the step")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert busy(8192, H100 / 47e9) > busy(4096, H100 / 47e9, micro_batches=2)

# %% [markdown]
# B wins clearly. With accumulation, only the *last* backward can hide the all-reduce, and it is as short as before.
# Accumulation pays the same exposed time half as often, while the larger batch hides nearly all of it.

# %% [markdown]
# ## Finding the knee
#
# The inequality was one line of algebra with two sweeping assumptions: that backward is one block, all of which can
# hide communication, and that an all-reduce has no latency. Is it any good? If it is, ranks with more and more tokens
# compute for a larger and larger part of a step, up to C/W tokens, and from there on for 100%: the curve has a knee.
#
# To look for it, we need a GPU whose C we know. Ours is a stand-in: each of the six blocks of a small GPT sleeps, for
# 1/32 ms per token in forward and 1/16 ms in backward. Sleeping takes time but no core. `OverlappedDDP` averages the
# gradients in seven buckets.


# %%
# %%ranks
from shared import measure
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu
from solutions.overlapped_ddp import OverlappedDDP

text = CharTokens()
text.tokens = text.tokens.to(device)
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
sample = text.windows([1000 * rank], length=16)  # short: the time of a step is that of the sleep


def gpu_with(tokens):
    """Build a wrapped model that computes for as long as a GPU would with this many tokens."""
    model = TinyGPT(config).to(device)
    stand_in_for_gpu(model.blocks, forward_ms=tokens / 32, backward_ms=tokens / 16)
    return OverlappedDDP(model, bucket_cap_mb=2.0)


def times_of(model, batch=sample, rounds=9):
    """Time a step with communication and the same step without it."""
    step, alone = (measure.training_step(model, *batch, sync=sync) for sync in (True, False))
    return measure.jobs({"step": step, "without communication": alone}, rounds=rounds)


# %% [markdown]
# W is written on the link: 1 Gbit/s, or 125 MB/s. Do the ranks get it? Let's time all-reduces as large as our buckets,
# and fit α and β as in chapter 01. The bus bandwidth W is 1/β.

# %%
# %%ranks
model = gpu_with(256)
bucket_bytes = [sum(p.nbytes for p in bucket.parameters) for bucket in model.buckets]
sizes_bytes = (400_000, 1_000_000, 2_000_000, 4_000_000)
all_reduces = measure.collectives({"all-reduce": dist.all_reduce}, sizes_bytes, rounds=20)

# %% tags=["nbval-ignore-output"]
link = ranks.pull("all_reduces")[0].fit("all-reduce", sends="ring all-reduce")
W = 1 / link.beta_s_per_byte
print(f"W = {W / 1e6:.0f} MB/s, α = {1e6 * link.alpha_s:.0f} µs")
bucket_bytes = ranks.pull("bucket_bytes")[0]
all_reduce_ms = 1e3 * formulas.all_reduce_sent_bytes(sum(bucket_bytes), 4) / W
needed = all_reduce_ms / (6 / 16)  # backward takes 6/16 ms per token
print(f"the bytes take {all_reduce_ms:.0f} ms, as long as a backward with {needed:.0f} tokens")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(0.75 < W / 125e6 < 1.25, "the link has the rate that it was given")
measure.expect(0 < link.alpha_s < 2e-3, "a message has a latency of less than 2 ms")

# %% [markdown]
# The rate is right, as far as a fit can tell: it may miss the 125 MB/s by several percent in either direction. The
# fitted α is less certain, because a shaped link has the latency of this machine, on which four processes share the
# cores: from run to run, α can differ by a factor of ten.
#
# Chapter 04's recurrence, eᵢ = max(eᵢ₋₁, fullᵢ) + tᵢ, needs neither assumption. It knows when each bucket is full, and
# the fitted α and W give tᵢ. On a shaped link, this is a real test, because the kernel delays packets and has never
# heard of buckets. The figure will show both predictions as lines, and what we measure as marks.
#
# **Predict.** For which part of a step will the ranks compute, with 128 tokens each? Forward then takes 24 ms and
# backward 48 ms.

# %%
my_prediction = None  # percent

# %%
# %%ranks --timeout 180
from itertools import accumulate

sweep = {tokens: times_of(gpu_with(tokens)) for tokens in (64, 128, 256, 384, 512, 1024)}
fractions = measure.ready_fractions(model, *sample, rounds=5)
counts = accumulate(len(bucket.parameters) for bucket in model.buckets)
full = [fractions[count - 1][0] for count in counts]  # after which part of a step a bucket is full

# %% tags=["nbval-ignore-output"]
sweep, full = ranks.pull("sweep")[0], ranks.pull("full")[0]
takes_s = [link.ring_all_reduce_s(size, 4) for size in bucket_bytes]
measured, buckets = {}, {}
for t, times in sweep.items():
    measured[t] = times.ratio("without communication", "step")
    compute_s = times["without communication"].time_s
    exposed_s = formulas.exposed_s([part * compute_s for part in full], takes_s, compute_s)
    buckets[t] = compute_s / (compute_s + exposed_s)
one_block = {t: busy(t, needed) for t in range(48, 1200, 8)}
lines = {"one block, no latency": one_block, "seven buckets, fitted α": buckets}
scaling_plots.knee(lines, {f"measured {sweep[128].where}": measured}, needed)

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(measured[64] < measured[256] < measured[1024], "more tokens hide more")
measure.expect(
    measured[64] < 0.5 and measured[1024] > 0.85, "there is a knee between 64 and 1,024 tokens"
)
measure.expect(measured[384] < one_block[384], "at the knee, the mark lies below the line")
measure.expect(measured[64] > one_block[64], "on the left, the mark lies above the line")
for t in (384, 512, 1024):
    closer = abs(buckets[t] - measured[t]) < abs(one_block[t] - measured[t])
    measure.expect(closer, f"with {t} tokens, the recurrence comes closer than one block")

# %% [markdown]
# The answer is about half: the bytes need about 125 ms, backward hides 48 of them, and a step computes 72.
#
# The marks level off near the place where one line of algebra put the knee, but gently, and below 100%. Right of the
# knee, the recurrence comes closer, for one reason: backward is *not* one block. The buckets become full one after the
# other, and the last two, with the embedding, only when backward is over. Nothing is left to hide them, in any step.
# Latency matters less on four ranks: 7 buckets · 6 steps · α are about 10 ms or less here.
#
# At 64 tokens, the simple line is too low, because it leaves out what the small GPT computes besides its sleep.
#
# The recurrence still lies above the marks: by a few points on an idle machine, by ten or more on a busy one. It
# assumes that all ranks are equally fast, and that sending needs no core. Here, gloo, the hooks and the copies share
# this machine's cores with the ranks, and each all-reduce waits for the slowest rank.
#
# So C/W is where you *begin* to be safe. Here, with three times as many tokens, about nine tenths of a step are
# computation.
#
# A **cost model** is a formula that predicts the time of a step from a few measured numbers. C/W is the smallest useful
# one, and the recurrence is a larger one.

# %% [markdown]
# ## Weak and strong scaling
#
# There are two ways to use more GPUs, and the inequality tells them apart.
#
# - In **weak scaling**, every rank keeps its T tokens, so the batch grows with N. You stay on the same side of C/W,
#   whatever N is.
# - In **strong scaling**, the ranks share one batch, so each has T/N tokens. Every GPU that you add moves all of them
#   toward the left of the figure.
#
# The **speed-up** is the number of samples per second on N ranks, divided by that on one rank. The **efficiency** is
# the speed-up divided by N, so 1 means that nothing is lost. If a step on N ranks takes $T_N$, the efficiency is $T_1 /
# T_N$ in weak scaling and $T_1 / (N \cdot T_N)$ in strong scaling.
#
# **Predict.** One rank trains with 512 tokens per step. Now four ranks share these 512 tokens. How much faster is a
# step? The figure gives you a first guess.

# %%
my_prediction = None  # times as fast

# %% tags=["nbval-ignore-output"]
one_ms = sweep[512]["without communication"].time_ms
print(f"strong scaling: {one_ms / sweep[128]['step'].time_ms:.1f} times as fast on four ranks")
print(f"weak scaling: {4 * one_ms / sweep[512]['step'].time_ms:.1f} times as many samples")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(one_ms / sweep[512]["step"].time_ms > 0.72, "weak scaling keeps most of it")
measure.expect(one_ms / sweep[128]["step"].time_ms < 2, "strong scaling is less than twice as fast")

# %% [markdown]
# Weak scaling keeps most of its efficiency. Strong scaling collapses: four ranks that share one batch are not even
# twice as fast as one.
#
# The figure said that ranks with 128 tokens compute for about half of the step. Four times one half would be a speed-up
# of 2, so why is it less? The missing part is what every step computes besides its sleep. The sleep shrinks when the
# batch is split, but these milliseconds do not.
#
# Strong scaling has an end that you can compute. With a batch of B tokens, each of N GPUs has B/N, and they stay busy
# up to
#
# $$N = \frac{B\,W}{C}.$$
#
# A batch of 4 million tokens feeds about 500 H100s if each host has one adapter of 400 Gbit/s, and 3,700 if each has
# eight. With 8,000 of them, data parallelism cannot be the only kind of parallelism, whatever the model. This is the
# second reason for all the chapters that follow. The first one is memory.

# %% [markdown]
# ## What does depend on N
#
# The bytes do not. Each rank sends 2(N−1)/N times the gradients, which is at most twice, on 8 GPUs or on 8,000. But a
# ring has 2(N−1) *steps*, and each of them costs a latency α, for every bucket.
#
# Take a GPT with 1.3 billion parameters, in 100 buckets of 25 MiB, with 8,192 tokens on an H100. Its backward lasts 108
# ms. The next cell adds up the latency of all buckets. NCCL can also send along trees, whose latency grows only with
# the logarithm of N (Jeaugey, 2019). We count 2 log₂N steps for them, as for halving and doubling in chapter 01.
#
# **Predict.** On 512 hosts with one GPU and one adapter of 400 Gbit/s each, and α = 14 µs, how much latency does the
# ring add per step?

# %%
my_prediction = None  # ms

# %%
import math

rows = []
for n in (8, 64, 512):
    each_ms = 100 * 14e-3  # one step of 100 buckets
    rows.append([f"{n}", f"{2 * (n - 1) * each_ms:,.0f}", f"{2 * math.log2(n) * each_ms:.0f}"])
tables.Table(["hosts", "ring, ms per step", "logarithmic, ms per step"], rows)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert round(1e3 * 4 * 1.3e9 * 8192 / H100) == 108

# %% [markdown]
# On 64 hosts, the latency of the ring exceeds backward, and on 512, it is thirteen times as long. Two things help.
# First, trees: with logarithmic latency, 25 ms are left on 512 hosts. But the bytes alone take 110 ms there and fill
# backward, so these 25 ms are exposed. Second, fewer and larger buckets: half as many halve every number in the table.
# So the best cap grows with the number of hosts.
#
# How well does data parallelism scale in practice? Goyal et al. (2017) kept about 90% of the efficiency from 8 to 256
# GPUs, in weak scaling. Llama 3 went from 8,192 to 16,384 GPUs with the same batch, which is strong scaling, and each
# GPU dropped from 430 to 400 TFLOP/s. The paper blames the smaller batch of each copy, not the network. When you read
# such numbers, ask for the batch per GPU and the link. Without them, a speed-up means nothing.

# %% [markdown]
# ## Whom would you blame?
#
# Now run the same model without the sleep, so that each rank computes on this machine's cores. If there are fewer cores
# than ranks, they have to take turns. The efficiency is then the product of two factors. Let $A_N$ be the time of the
# step on N ranks without communication, that is, inside `no_sync()`:
#
# $$\frac{T_1}{T_N} = \underbrace{\frac{T_1}{A_N}}_\text{computation} \cdot
# \underbrace{\frac{A_N}{T_N}}_\text{communication}$$
#
# Look at the column "computation". It should be 100%, because ranks that send nothing cannot slow each other down. Can
# they?

# %%
# %%ranks
several = text.windows(range(1000 * rank, 1000 * rank + 300, 100), length=64)


def steps_on_cores():
    return times_of(OverlappedDDP(TinyGPT(config).to(device), bucket_cap_mb=2.0), several)


# %% tags=["nbval-ignore-output"]
on_cores = measure.scaling("steps_on_cores", timeout_s=200)
on_cores

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
import os

few_cores = os.cpu_count() < 4
measure.expect(
    not few_cores or on_cores.computation(4) < 0.8, "ranks on few cores slow each other down"
)

# %% [markdown]
# With fewer cores than ranks, they can: two cores do not compute for four ranks at once. Somebody who only looks at
# $T_1/T_N$ buys a faster network. But even a perfect one would leave the efficiency at what the column "computation"
# says. GPUs have no such cores to share, but slow data loaders, a busy file system and a hot rack do the same to them.
# **Always compare with the same step without communication, on the same number of ranks.**

# %% [markdown]
# ## Stragglers and skew
#
# So far, all ranks were equally fast. A **straggler** is a rank that is slower than the others: its GPU is throttled,
# its data loader is late, or its samples are longer. The **skew** of a collective is the time between the first and the
# last rank that reach it. In the next cell, rank 3 gets a GPU that is half as fast.
#
# **Predict.** By what factor does the step of the *other* three ranks become longer?

# %%
my_prediction = None  # 1 means not at all

# %%
# %%ranks
skewed = gpu_with(1024 if rank == 3 else 512)
times = times_of(skewed, rounds=5)
lines = measure.recorded_step(skewed, *sample, rounds=3)

# %% tags=["nbval-ignore-output"]
factor = ranks.pull("times")[0]["step"].time_s / sweep[512]["step"].time_s
print(f"The step of every rank takes {factor:.2f} times as long.")
plots.timeline(ranks.pull("lines")[0][::3])  # ranks 0 and 3

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(1.3 < factor < 2, "all ranks wait for the straggler")

# %% [markdown]
# Everybody waits for rank 3. Only its sleep doubles; the rest of its computation and its exposed communication do not,
# so the factor stays clearly below 2. In the timelines, rank 0 ends its backward long before rank 3, and spends the
# rest of the step in all-reduces. Ranks 1 and 2 look like rank 0. That makes stragglers hard to find: in a profile, the
# three *healthy* ranks show long all-reduces and look guilty, and the sick one shows only short ones.
#
# With many ranks, nothing needs to be broken. Suppose that the computing time of each rank varies from step to step,
# with a standard deviation of 5%. The slowest of N ranks sets the pace. Of 8 normally distributed times, the longest is
# on average 7% above the mean, of 64 it is 12%, and of 512 it is 15%.

# %% [markdown]
# ## Does a faster step mean faster training?
#
# Weak scaling is easy because the batch grows with N. But you do not want samples per second. You want a trained model,
# and a larger batch only helps if training then needs fewer steps.
#
# Let's count them. We train the digits MLP until it recognizes 90% of 297 test images, with 16 images per rank and
# step. N ranks take the same steps as one process with their global batch (chapter 02), so one process is enough. A
# larger batch makes the gradient less noisy, but at the same learning rate, the steps do not become longer. So the
# **linear scaling rule** multiplies the learning rate by N, too, after a warm-up in which it grows from its old value
# (Goyal et al., 2017). Compare the last three columns.

# %%
import torch
from torch.nn.functional import cross_entropy

from shared.data import digits
from shared.models import MLP

images, labels = digits()


def steps_to_90(batch, rate):
    """Train. Returns the number of steps until 90% of the test images are right."""
    generator = torch.Generator().manual_seed(0)
    mlp = MLP(seed=0)
    optimizer = torch.optim.SGD(mlp.parameters())
    for step in range(1, 3001):
        optimizer.param_groups[0]["lr"] = 0.1 + min(1, step / 20) * (rate - 0.1)  # warm-up
        drawn = torch.randint(1500, (batch,), generator=generator)
        optimizer.zero_grad()
        cross_entropy(mlp(images[drawn]), labels[drawn]).backward()
        optimizer.step()
        right = mlp(images[1500:]).argmax(dim=1) == labels[1500:]
        if step % 10 == 0 and right.float().mean() >= 0.9:
            return step


# %% tags=["nbval-ignore-output"]
steps = {}
for n in (1, 2, 4):
    steps[n] = steps_to_90(16 * n, 0.1), steps_to_90(16 * n, 0.1 * n), steps_to_90(16, 0.1 * n)
rows = [[f"{n}", f"{16 * n}", *map(str, found)] for n, found in steps.items()]
header = ["ranks N", "global batch", "steps, lr 0.1", "steps, lr 0.1 · N", "one rank, lr 0.1 · N"]
tables.Table(header, rows)

# %% tags=["claims"] jupyter={"source_hidden": true}
assert steps[4][0] > 0.75 * steps[1][0]
assert steps[4][1] < 0.75 * steps[1][0]
assert steps[4][1] > 0.75 * steps[4][2]

# %% [markdown]
# With the same learning rate, four ranks need almost as many steps as one, although each step has four times as many
# samples. Almost three quarters of the work is wasted. With the scaled rate, four ranks need half as many steps. A
# success?
#
# Look at the last column before you celebrate. It has the control: *one* rank with the same learning rate. On four
# ranks, nine tenths of the gain came from the rate; on two, three fifths. It is one seed, so trust the direction and
# not the digits. Our digits are so easy that 16 images already give a good gradient. Beyond a **critical batch size**,
# more samples per step save fewer and fewer steps (McCandlish et al., 2018), and this task is close to it already. For
# language models, Kaplan et al. (2020) put it at one to two million tokens toward the end of training, and it grows as
# the loss falls. So weak scaling ends, too: not on the network, but where the optimizer has seen enough.

# %% [markdown]
# ## Recap
#
# Three things worth keeping:
#
# - **T ≥ C/W**: an H100 needs about 1,100 tokens per backward on NVLink, and 8,400 with one adapter of 400 Gbit/s per
#   host. Near that limit, the last buckets and the latency are still exposed.
# - **N = BW/C**: with a batch of B tokens, strong scaling ends there.
# - **2(N−1)α per bucket**: the communication cost that keeps growing with N. Trees and larger buckets lower it.
#
# **Terms**
#
# - **weak scaling**: every rank has its own batch of a fixed size, so N ranks process N times as many samples per step.
# - **strong scaling**: the ranks share one batch, so each of N ranks processes 1/N of it.
# - **speed-up**: the samples per second on N ranks, divided by those on one rank.
# - **efficiency**: the speed-up on N ranks, divided by N; 1 means that nothing is lost.
# - **cost model**: a formula that predicts the time of a step from a few measured numbers, such as α, β and the
#   computing time.
# - **straggler**: a rank that is slower than the others, which then wait for it in every collective.
# - **skew**: the time between the first and the last rank that reach a collective.
# - **linear scaling rule**: multiply the learning rate by the same factor as the global batch.
# - **critical batch size**: the batch beyond which more samples per step save fewer and fewer steps.

# %% [markdown]
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): how to measure α, W and stragglers there.
# - Austin et al., *How to Scale Your Model*, 2025 (jax-ml.github.io/scaling-book). Its part on training has the same
#   inequality for TPUs, and for every other kind of parallelism.
# - Grattafiori et al., *The Llama 3 Herd of Models*, 2024 (arXiv 2407.21783). Section 3.3 is the best published account
#   of one large training, its layouts and its failures.
# - Jeaugey, *Massively scale your deep learning training with NCCL 2.4* (NVIDIA developer blog, 2019). It shows how
#   trees keep the latency low on many GPUs.
# - Goyal et al., *Accurate, large minibatch SGD: training ImageNet in 1 hour*, 2017 (arXiv 1706.02677). It explains the
#   linear scaling rule, its warm-up and its limits.
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
# First, the lab: you put latency into the inequality, choose how many micro-batches to accumulate, measure what
# communication really costs, and find the knee of your own run.

# %%
ranks.stop()
