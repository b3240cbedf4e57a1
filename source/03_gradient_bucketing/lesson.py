# ---
# jupyter:
#   course:
#     module: bucketed_ddp
# ---

# %% [markdown]
# # 03 · Gradient bucketing
#
# **30–50 minutes.** After this lesson, you will be able to:
#
# - measure the cost of many small all-reduces, and split their time into latency and transfer,
# - pack gradients into a few flat buckets, and avoid holding every gradient twice,
# - predict the communication time for any bucket cap, and say when a larger cap no longer helps much,
# - describe the rule by which torch's DDP assigns gradients to buckets, and where it differs from yours.
#
# You need α, β and the ring (chapter 01), and `ManualDDP` (chapter 02).

# %% [markdown]
# ## Where we are
#
# In chapter 02, you built `ManualDDP`. After backward, it averages the gradients with one all-reduce per parameter,
# where a parameter is one tensor, such as the weight of a layer. For a GPT of two blocks, that was twenty all-reduces.
#
# GPT-2 would need 148, and even on NVLink, as little as a seventh of their time would go to the bytes. Here is the
# arithmetic for 8 H100, with gradients in bf16. In a ring of eight, an all-reduce takes 14 steps, and each step has a
# latency of at most 3.4 µs:
#
# | model | all-reduces | bytes, and their time | latency of all all-reduces | what bucketing can save |
# |---|---|---|---|---|
# | GPT-2, 124 million | 148 | 0.25 GB: 1.2 ms | 148 · 14 · 3.4 µs = 7.0 ms | at most 86% |
# | Llama-2, 7 billion | 291 | 13.5 GB: 64 ms | 291 · 14 · 3.4 µs = 14 ms | at most 18% |
#
# The percentages are upper bounds, because NCCL has a protocol with 0.6 µs per step for tensors of a few KB.
#
# Bucketing saves the most where tensors are small, so this lesson uses a small GPT with twelve blocks. On one host, a
# large model saves little time, but it needs buckets as well: you launch them during backward in chapter 04, and divide
# them among the ranks in chapter 08.
#
# Ranks on one machine have no links of their own, so this lesson puts each rank behind an emulated link of 1 Gbit/s. On
# this link, a byte takes 8 ns, and the latency is 2 ms, as in 400 km of fiber.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks, widgets
from shared.plots import diagrams
from shared.predictions import predicted

ranks.start(world_size=4, backend="gloo:cpu", detect_mismatch=False)

# %%
# %%ranks
from shared import measure, timeline, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.manual_ddp import ManualDDP

link = measure.behind_link("1gbit", latency_ms=2)

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=12)
inputs, targets = text.windows(range(rank, 400, 100), length=32)
model = TinyGPT(config, seed=rank)
by_hand = ManualDDP(model)

with wire.ledger() as log:
    by_hand(inputs, targets).backward()
    by_hand.finish_gradient_sync()
print(log.summary())

# %% [markdown]
# ## What is wasted
#
# The next cells record a step and plot it for rank 0, first the whole step and then its first 100 ms. Compare forward
# and backward with the communication that follows. The first all-reduce may take longer than the others, because it
# also waits for the slowest rank's backward. The printed times leave out the gaps between the bars.

# %%
# %%ranks
step = measure.training_step(by_hand, inputs, targets)
lines = measure.recorded({"step": step}, lambda: timeline.record(by_hand), rounds=5)["step"]

# %% tags=["nbval-ignore-output"]
line = ranks.pull("lines")[0][0]
print(f"{line.communication_ms:.0f} ms of communication, {line.compute_ms:.0f} ms of computation")
display(plots.timeline([line], ["whole step"], exposed=False))
plots.timeline([line.first(100)], ["first 100 ms"], exposed=False)

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
from shared import measure

log = ranks.pull("log")[0]
assert log.messages == 100 and log.payload_bytes == 2_412_544
assert round(1e3 * 8e-9 * log.sent_bytes) == 29
measure.expect(line.communication_ms > 5 * 29, "the bytes are a small part of the time")

# %% [markdown]
# Almost the whole step is communication. Is the link too slow for that many bytes? No: the ledger says that each rank
# must send 3.62 MB, and at 8 ns per byte, that takes 29 ms. Where does the rest of the time go?
#
# **Predict.** We run 100 all-reduces again, but with tensors of only 100 elements (400 bytes). Together, these tensors
# have about a sixtieth of the gradients' bytes. How long do the all-reduces take, as a fraction of the time for the
# gradients? 1 would mean the same time, and 0.02 a time proportional to the bytes.

# %%
my_prediction = None

# %%
# %%ranks
small = torch.zeros(100)


def all_reduce_100_times():
    for _ in range(100):
        dist.all_reduce(small)


ways = {"small tensors": all_reduce_100_times, "gradients": by_hand.finish_gradient_sync}
times = measure.jobs(ways, rounds=5)
alpha_ms = times["small tensors"].time_ms / 100

# %% tags=["nbval-ignore-output"]
small_ms, gradients_ms = ranks.pull("times")[0].ms().values()
print(f"{predicted(my_prediction)}measured {small_ms / gradients_ms:.2f}")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(small_ms / gradients_ms > 0.7, "small all-reduces take about as long")

# %% [markdown]
# A sixtieth of the bytes, and almost all of the time. We are paying per call.

# %% [markdown]
# ## Latency and bytes
#
# In chapter 01, sending a message of S bytes took α + βS seconds. A ring all-reduce on N = 4 ranks takes 2(N−1) = 6
# steps, one after the other, and in each step a rank sends a message with a quarter of the tensor. So it takes
#
# $$6\left(\alpha + \beta\,\frac{S}{4}\right) = 6\alpha + 1.5\,\beta S$$
#
# A whole all-reduce therefore follows the same α–β model, with 6α and 1.5β. On our link, these are 12 ms and 12 ns per
# byte. From here on, we call *them* α and β. A small all-reduce is **latency-bound**: α is most of its time. A large
# one is **bandwidth-bound**: βS is most of its time. And n all-reduces of S bytes in total take
#
# $$T = n\alpha + \beta S$$
#
# Your small tensors have hardly any bytes, so they tell you α:

# %% tags=["nbval-ignore-output"]
alpha_ms = small_ms / 100
print(f"α = {alpha_ms:.1f} ms, so T = 100 α + 29 ms = {100 * alpha_ms + 29:.0f} ms")
print(f"measured {gradients_ms:.0f} ms")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(12 < alpha_ms < 19, "α is near 12 ms")
measure.expect(1 / 1.6 < gradients_ms / (100 * alpha_ms + 29) < 1.6, "the formula comes close")

# %% [markdown]
# The part of α beyond 12 ms is Python: waking up and launching the next call. The agreement tests only our bookkeeping,
# such as the number of calls, because our emulated link delays each all-reduce by exactly this formula.
#
# Could we launch all 100 with `async_op=True`, and wait afterwards? That would hide Python's part of α, but not the
# other 12 ms. Our link runs one collective at a time, as NCCL does within one process group.
#
# We can change neither α nor β, and we have to send all the bytes. But we can send them in fewer all-reduces.

# %% [markdown]
# ## One flat tensor
#
# The simplest way to make fewer calls is to make only one. Copy all gradients into one **flat tensor**, a tensor with
# one dimension, all-reduce it, and copy the averages back. Compare the times, which include the copying.


# %%
# %%ranks
def average_flat(parameters):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    slices = flat.split([p.numel() for p in parameters])
    for p, grad_slice in zip(parameters, slices, strict=True):
        p.grad.copy_(grad_slice.view_as(p))


parameters = list(model.parameters())
ways = {
    "100 all-reduces": by_hand.finish_gradient_sync,
    "1 all-reduce": lambda: average_flat(parameters),
}
times = measure.jobs(ways, rounds=5)

# %% tags=["nbval-ignore-output"]
times = ranks.pull("times")[0]
plots.bars(times.ms(), "ms on the emulated link (median of 5 rounds)")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(times.ratio("100 all-reduces", "1 all-reduce") > 5, "one is much faster than 100")


# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
def gradients_after(average):
    model.zero_grad()
    model(inputs, targets).backward()
    average()
    return torch.cat([p.grad.flatten() for p in parameters])


expected = gradients_after(by_hand.finish_gradient_sync)
with wire.ledger() as flat_log:
    found = gradients_after(lambda: average_flat(parameters))
assert torch.allclose(found, expected, atol=1e-6)
assert flat_log.messages == 1 and flat_log.payload_bytes == log.payload_bytes

# %% [markdown]
# The gradients are the same, and so are the bytes. One α of 13 to 14 ms and 29 ms for the bytes make about 43 ms, so
# the copying costs almost nothing.

# %% [markdown]
# ## The second copy
#
# **Predict.** The gradients take 2.41 MB. How many MB do the gradients and the flat tensor take together at the peak?

# %%
my_prediction_mb = None

# %%
# %%ranks
from shared import memory

with memory.peak(model) as peak:
    average_flat(parameters)
held = peak.held.by_component()

# %%
held = ranks.pull("held")[0]
both_bytes = held["gradients"] + held["buckets"]
print(f"{predicted(my_prediction_mb, '{} MB')}measured {both_bytes / 1e6:.2f} MB")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert both_bytes == 2 * held["gradients"] == 2 * log.payload_bytes

# %% [markdown]
# That is twice the size of the gradients: a rank holds every gradient once in `.grad` and once in the flat tensor. With
# 7 billion parameters in bf16, the second copy would take 14 GB.

# %% [markdown]
# Do we need the second copy? A **view** is a tensor that has no memory of its own, but uses part of another tensor's
# memory. In the next cell, each parameter's `.grad` is a view of `flat` before backward runs. Backward computes
# gradients of 3 and 5. Where do they end up?

# %%
# %%ranks 0
a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1, 2))
flat = torch.zeros(4)
a.grad, b.grad = flat[:2], flat[2:].view(1, 2)
(3 * a.sum() + 5 * b.sum()).backward()
print(flat.tolist())

# %% [markdown]
# Backward adds to the `.grad` that it finds, so it writes directly into the flat tensor. There is nothing to copy, and
# no second copy. But a `.grad` remains a view only until something replaces it, as exercise 3.3 of the lab shows.

# %% [markdown]
# ## Several buckets
#
# A single flat tensor has a disadvantage that the ledger does not show: it is complete only when the *last* gradient
# is, so its all-reduce cannot start before backward ends.
#
# Backward goes through the layers in reverse, so the gradients of the last layers are complete first, and that of the
# token embedding comes last. The output layer uses the embedding's weight too, but the gradient of that weight is the
# sum over both uses, so it is complete only at the end.
#
# So we split the gradients into several flat tensors, starting at the end of the model. A **bucket** is a group of
# gradients that share one flat tensor and one all-reduce. The first bucket is complete early in backward. The **bucket
# cap** is the largest number of bytes that a bucket may hold. The diagram has made-up sizes, a cap of 20 MB, and an
# output layer with a weight of its own. Follow the gradients from right to left.

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
completed = []
handles = [
    p.register_post_accumulate_grad_hook(lambda _, name=name: completed.append(name))
    for name, p in model.named_parameters()
]
model(inputs, targets).backward()
for handle in handles:
    handle.remove()
assert completed[0].startswith("norm.") and completed[-1] == "token_embedding.weight"

# %%
diagrams.buckets()

# %% [markdown]
# The next cell applies six caps, from "none" (each gradient is sent by itself) to 25 MiB (one bucket for all):


# %%
# %%ranks
def in_buckets(parameters, cap_bytes):
    """Group parameters from last to first, at most cap_bytes in a bucket. A larger parameter is alone in its bucket."""
    buckets, room_bytes = [], -1  # nothing fits, so the first parameter opens a bucket
    for p in reversed(parameters):
        if p.nbytes > room_bytes:
            buckets.append([])
            room_bytes = cap_bytes
        buckets[-1].append(p)
        room_bytes -= p.nbytes
    return buckets


caps_kib = {"none": 0, "30 KiB": 30, "100 KiB": 100, "350 KiB": 350, "1 MiB": 1024, "25 MiB": 25600}
by_cap = {cap: in_buckets(parameters, kib * 1024) for cap, kib in caps_kib.items()}
print({cap: len(buckets) for cap, buckets in by_cap.items()})

# %% [markdown]
# `in_buckets` and `average_flat` are enough to train a model in which every parameter gets a gradient. `average_flat`
# frees its flat tensor, so only one bucket's gradients are held twice at a time.
#
# ## Choosing a cap
#
# **Predict.** With a cap of 350 KiB, there are 8 buckets with a total of 2.41 MB. You know α, and β is 12 ns per byte.
# How many milliseconds does it take to average the buckets, one after the other?

# %%
my_prediction_ms = None


# %%
# %%ranks
from functools import partial

from shared.plots import buckets as bucket_plots


def average_all(buckets):
    for bucket in buckets:
        average_flat(bucket)


ways = {cap: partial(average_all, buckets) for cap, buckets in by_cap.items()}
logs = measure.recorded(ways, wire.ledger, rounds=5)
sizes_bytes, runs = bucket_plots.runs_of(model, by_cap, logs, alpha_ms, ns_per_byte=12)

# %% [markdown]
# In the next figure, each row is a cap. The left half shows the model, split into its buckets, from a strong color for
# the first bucket to a faint one for the last. Rows with over 20 buckets alternate between two grays. In the right
# half, compare the measured times with nα + βS.

# %% tags=["nbval-ignore-output"]
sizes_bytes, runs = ranks.pull("sizes_bytes")[0], ranks.pull("runs")[0]
took_ms = {run.cap: run.took_ms for run in runs}
print(f"350 KiB: {predicted(my_prediction_ms, '{} ms')}measured {took_ms['350 KiB']:.0f} ms")
widgets.cap_chooser(sizes_bytes, runs)

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
off = sorted(run.took_ms / run.predicted_ms for run in runs)
measure.expect(1 / 1.6 < off[len(off) // 2] < 1.6, "the formula comes close")
first_saved_ms, then_saved_ms = (
    took_ms["none"] - took_ms["100 KiB"],
    took_ms["100 KiB"] - took_ms["25 MiB"],
)
measure.expect(first_saved_ms > then_saved_ms, "most is saved by the first buckets")
measure.expect(took_ms["25 MiB"] == min(took_ms.values()), "one bucket is the fastest")

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
assert len(by_cap["350 KiB"]) == 8 and len(by_cap["25 MiB"]) == 1
assert torch.allclose(gradients_after(ways["350 KiB"]), expected, atol=1e-6)

# %% [markdown]
# Eight buckets take 8 α + 29 ms: with an α of 13 to 14 ms, 133 to 141 ms.

# %% [markdown]
# Each all-reduce that a larger cap avoids saves one α, and nothing else. When does that no longer help much? At α/β
# bytes, about 1.1 MB here, latency and transfer cost the same. A bucket k times that size pays 1/k extra: at 10 α/β
# bytes, the latency adds 10% to the transfer. From there on, a larger cap can save at most 1/11 of the total. As long
# as buckets are sent after backward, a single bucket is fastest.
#
# But a larger cap has a price. In chapter 04, buckets are sent during backward, and two of them then matter most: the
# first, because nothing is sent until it is full, and the last, because nothing is left to hide it.
#
# > **Found in the wild.** torch's DDP has one small bucket of 1 MiB. Is it the first or the last? `distributed.py` of
# > torch 2.13 says both: it is for "parameters that are defined first", whose gradients come last, and it is "to reduce
# > latency for early-computed gradients". In PyTorch issue 48880, a maintainer says that it is the last one. But the
# > small bucket in that issue has 2,052,000 bytes: the 513,000 parameters of ResNet-18's output layer, whose gradients
# > are ready *first*. From step 2 on, DDP fills buckets in the order in which gradients became ready, and starts with
# > the small one. `DDP_SET_LAST_BUCKET_CAP=1` makes it the last. The next ledger shows the order.

# %% [markdown]
# ## The production version
#
# In torch's DDP, the argument `bucket_cap_mb` is the cap in MiB (2²⁰ bytes). With the default of 25 MiB, one bucket has
# a smaller cap of 1 MiB. If you choose another cap, DDP uses it for all buckets. What does DDP send in its first three
# steps?

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

ddp = DistributedDataParallel(TinyGPT(config))
for step in (1, 2, 3):
    with wire.ledger() as log:
        ddp(inputs, targets).backward()
    print(f"step {step}:", "; ".join(f"{e.op} {e.payload_bytes:,} B" for e in log.entries))

# %% [markdown]
# - **Step 1** uses a single bucket, because DDP does not yet know in which order backward completes the gradients. It
#   records that order.
# - **At the start of step 2**, each rank assigns the gradients to buckets in the recorded order. Rank 0 broadcasts its
#   **bucket assignment**, the list that says which gradient is in which bucket, so that all ranks use the same one. The
#   first broadcast sends 100 indices and the number of buckets, and the second the number of gradients in each bucket.
# - **The first bucket is larger than its cap** of 1,048,576 bytes. DDP closes a bucket once it has *reached* its cap,
#   so the last gradient may push it over the cap (PyTorch issue 48880). Our function closes a bucket before that
#   happens.
#
# By default, DDP also holds a second copy of every gradient. With `gradient_as_bucket_view=True`, gradients are views
# of its buckets. This saves the memory, but not always the copying: by default, `zero_grad()` sets `.grad` to None, so
# backward allocates a new tensor for each gradient. As soon as a gradient is complete, DDP copies it into its bucket,
# frees that tensor, and makes `.grad` a view again.

# %% [markdown]
# ## Real links
#
# How large should a bucket be on a real link? For a ring of N ranks, divide the α of an all-reduce by its β. With the α
# and β of one message, the quotient is
#
# $$\frac{\alpha_\text{all-reduce}}{\beta_\text{all-reduce}}
# = \frac{2(N-1)\,\alpha}{\frac{2(N-1)}{N}\,\beta} = N \cdot \frac{\alpha}{\beta}$$
#
# At that size, latency takes half of the time. The size grows with N, so more ranks need larger buckets. With the links
# of chapter 01, it is 8 · 3.4 µs · 370 GB/s = 10 MB for 8 H100 on NVLink 4, and 64 · 4.72 µs · 370 GB/s = 112 MB for 64
# H100 with 8 InfiniBand adapters per host. The 291 gradients of Llama-2 have 46 MB on average, which is enough on one
# host. On 64 GPUs, a ring that reduces them one by one spends 71% of its time on latency.

# %% tags=["claims"] jupyter={"source_hidden": true}
from shared.planner.links import REAL_LINKS

even_mb = [link.gpus * link.alpha_s / link.beta_s_per_byte / 1e6 for link in REAL_LINKS]
assert (round(even_mb[0]), REAL_LINKS[0].gpus) == (10, 8)
assert (round(even_mb[2]), REAL_LINKS[2].gpus) == (112, 64)

# %% [markdown]
# These sizes are for buckets that nothing hides. Once communication runs behind backward (chapter 04), a latency that
# is hidden costs nothing. Even so, a developer of torch finds 25 MiB too small, and proposes 100 MB (PyTorch issue
# 118421). Megatron-Core's default on N ranks is max(40 million, 1 million · N) parameters in a bucket, so that
# collectives "do not become latency-bound". Without overlap, it uses a single bucket: the choice that was fastest here.

# %% [markdown]
# ## Recap
#
# S is the size of all gradients in bytes, and N the number of ranks. Every version sends 2(N−1)/N · S bytes per rank.
# torch's DDP sends them during backward, the others after it.
#
# | | memory for gradients | all-reduces |
# |---|---|---|
# | `ManualDDP` | S | one per parameter |
# | one flat tensor, copied | 2S at the peak | 1 |
# | buckets, copied one by one | S plus one bucket at the peak | one per bucket |
# | buckets, gradients stay views | S | one per bucket |
# | torch's DDP | 2S; with `gradient_as_bucket_view=True`, S plus one gradient at the peak | one per bucket |
#
# Communication takes α for each all-reduce, plus βS for the bytes. The cap changes only the first part.
#
# **Terms**
#
# - **latency-bound**: a collective is latency-bound if most of its time is latency, which does not depend on its bytes.
# - **bandwidth-bound**: a collective is bandwidth-bound if most of its time is the transfer of its bytes.
# - **flat tensor**: a tensor with one dimension that holds the elements of several tensors one after the other.
# - **view**: a tensor without memory of its own, which uses part of another tensor's memory.
# - **bucket**: a group of gradients that share one flat tensor and are averaged by one all-reduce.
# - **bucket cap**: the largest number of bytes that a bucket may hold.
# - **bucket assignment**: the list that says which gradient is in which bucket; it must be the same on all ranks.

# %% [markdown]
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): how to see buckets, and how to choose a cap there.
# - Li et al., [PyTorch Distributed: Experiences on Accelerating Data Parallel
#   Training](https://arxiv.org/abs/2006.15704), VLDB 2020, §3.2: the design of DDP, which starts from the same problem
#   as this lesson.
# - [Distributed Data Parallel](https://docs.pytorch.org/docs/stable/notes/ddp.html), "Internal Design": why buckets
#   follow the reverse order of the parameters, and why they are always sent in the same order.
# - [PyTorch issue 48880](https://github.com/pytorch/pytorch/issues/48880): a maintainer explains, with the sizes of a
#   real model, why buckets exceed `bucket_cap_mb`.

# %% [markdown]
# ## What is still wasted
#
# With a cap of 350 KiB, there are only eight all-reduces, but all of them come after backward. While they are in
# flight, the rank computes nothing. Yet the gradients of the first bucket were complete long before. Chapter 04 sends
# them right then.
#
# First, you build the wrapper `BucketedDDP` in the lab. To watch buckets outside a notebook, run `torchrun
# --nproc_per_node=2 labs/gradient_sync_visualizer.py`.

# %%
ranks.stop()
