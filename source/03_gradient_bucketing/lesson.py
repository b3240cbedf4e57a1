# ---
# jupyter:
#   course:
#     module: bucketed_ddp
# ---

# %% [markdown]
# # 03 · Gradient bucketing
#
# **55–85 minutes.** After this lesson, you will be able to:
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
# Bucketing saves the most where tensors are small, so this lesson uses a small GPT with twelve blocks. A large model
# saves little time, but it needs buckets as well: they are what you launch during backward in chapter 04, and what
# ZeRO cuts into shards in chapter 07.
#
# Chapter 01 showed that times over loopback are misleading, because ranks on one machine have no links of their own. So
# this lesson puts each rank behind an emulated link of 1 Gbit/s. On this link, a byte takes 8 ns, and the latency is 2
# ms, as in 400 km of fiber.

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks, tables, widgets
from shared.plots import buckets as bucket_plots
from shared.plots import costs as cost_plots
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
parameters = list(model.parameters())

by_hand(inputs, targets).backward()
with wire.ledger() as log:
    by_hand.finish_gradient_sync()
print(f"{len(parameters)} parameters with {sum(p.numel() for p in parameters):,} elements")
print(log.summary())

# %% [markdown]
# ## What is wasted
#
# In chapter 02, twenty all-reduces took 240 ms of latency. That figure came from a formula, and now we test it. The
# next cells record a step and plot it for rank 0, first the whole step and then its first 60 ms. Compare forward
# and backward with the communication that follows. The printed times leave out the gaps between the bars.

# %%
# %%ranks
step = measure.training_step(by_hand, inputs, targets)
lines = measure.recorded({"step": step}, lambda: timeline.record(by_hand), rounds=5)["step"]

# %% tags=["nbval-ignore-output"]
line, log = ranks.pull("lines")[0][0], ranks.pull("log")[0]
print(f"{line.communication_ms:.0f} ms of communication, {line.compute_ms:.0f} ms of computation")
display(plots.timeline([line], ["whole step"], exposed=False))
plots.timeline([line.first(60)], ["first 60 ms"], exposed=False)

# %% [markdown]
# Is the link too slow for that many bytes? In a ring of N ranks, each rank sends 2(N−1)/N times the bytes of the
# gradients, at 8 ns per byte:

# %% tags=["nbval-ignore-output"]
bytes_ms = 1e3 * 8e-9 * log.sent_bytes
print(f"{log.sent_bytes / 1e6:.2f} MB · 8 ns per byte = {bytes_ms:.0f} ms")
measure.expect(line.communication_ms > 5 * bytes_ms, "the bytes are a small part of the time")

# %% [markdown]
# The bytes explain only a small part of the time. Where does the rest go?
#
# **Predict.** We run 100 all-reduces again, but with tensors of only 100 elements (400 bytes). Together, these tensors
# have about a sixtieth of the gradients' bytes. How long do the all-reduces take, as a fraction of the time for the
# gradients? 1 would mean the same time; 0.02 would mean a time proportional to the bytes.

# %%
my_prediction = None

# %%
# %%ranks
small = torch.zeros(100)


def all_reduce_100_times():
    for _ in range(100):
        dist.all_reduce(small)


ways = {"100 all-reduces of 400 bytes": all_reduce_100_times}
times = measure.jobs(ways | {"100 gradients": by_hand.finish_gradient_sync}, rounds=5)

# %% tags=["nbval-ignore-output"]
times = ranks.pull("times")[0]
small_ms, gradients_ms = times.ms().values()
fraction = small_ms / gradients_ms
print(f"{predicted(my_prediction)}measured {fraction:.2f}")
measure.expect(fraction > 0.7, "small all-reduces take about as long")
plots.bars(times.ms(), "ms (median of 5 rounds)")

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
# A whole all-reduce therefore follows the same α–β law, with 6α and 1.5β. On our link, we expect α = 12 ms and β = 12
# ns per byte. The next cell times all-reduces of seven sizes, each called five times in a row, like those after
# backward. It also times the 100 gradients again, for later.
#
# One warning before you admire the fit: our emulated link delays each all-reduce by exactly this formula. What the next
# cells test is our bookkeeping, such as the number of calls.

# %%
# %%ranks
sizes_bytes = (400, 4_000, 64_000, 256_000, 1_000_000, 2_000_000, 4_000_000)
sums = measure.collectives({"all-reduce": dist.all_reduce}, sizes_bytes, repeats=5, rounds=10)
gradients = measure.jobs({"100 gradients": by_hand.finish_gradient_sync}, rounds=5)

# %% [markdown]
# The next figure shows the fitted formula as a curve, and the measured times as markers. Look at both ends of the
# curve.

# %% tags=["nbval-ignore-output"]
sums = ranks.pull("sums")[0]
fitted = sums.fit("all-reduce")
curve_s = sums.measured_s["all-reduce"]
measure.expect(curve_s[4_000] < 1.5 * curve_s[400], "the curve is flat on the left")
measure.expect(curve_s[4_000_000] > 3 * curve_s[400], "the curve rises on the right")
cost_plots.predicted_against_measured(
    {"all-reduce": fitted.message_s}, sums.measured_s, "bytes in the tensor", lines_are="fitted"
)

# %% [markdown]
# On the left, the curve is nearly flat: a small all-reduce is **latency-bound**, which means that α is most of its
# time. On the right, the time grows with the size: a large all-reduce is **bandwidth-bound**, which means that βS is
# most of its time. Now compare the fitted α and β with what we expect of the link:

# %% tags=["nbval-ignore-output"]
alpha_ms, beta_ns = 1e3 * fitted.alpha_s, 1e9 * fitted.beta_s_per_byte
measure.expect(0.9 < alpha_ms / 12 < 1.6 and 0.8 < beta_ns / 12 < 1.25, "both are near 12")
rows = [["fitted", f"{alpha_ms:.1f}", f"{beta_ns:.1f}"], ["expected of the link", "12", "12"]]
tables.Table(["an all-reduce", "α, ms", "β, ns per byte"], rows, fitted.where)

# %% [markdown]
# β is that of the link. What α has beyond 12 ms is Python: waking up and launching the next call.
#
# Do the fitted α and β predict the time of the 100 gradients? If n all-reduces have $S_1, \dots, S_n$ bytes, and S
# bytes in total, they take
#
# $$T = \sum_{i=1}^n\,(\alpha + \beta S_i) = n\alpha + \beta S$$

# %% tags=["nbval-ignore-output"]
latency_ms = 1e3 * fitted.alpha_s * log.messages
transfer_ms = 1e3 * fitted.beta_s_per_byte * log.payload_bytes
measured_ms = ranks.pull("gradients")[0]["100 gradients"].time_ms
formula_ms = latency_ms + transfer_ms
print(f"latency {latency_ms:.0f} ms + bytes {transfer_ms:.0f} ms = {formula_ms:.0f} ms")
print(f"measured {measured_ms:.0f} ms")
measure.expect(1 / 1.6 < measured_ms / formula_ms < 1.6, "the formula comes close")

# %% [markdown]
# They do, up to noise. Could we launch all 100 with `async_op=True`, and wait afterwards? That would hide Python's part
# of α, about 1 ms per call, but not the other 12 ms. Our link runs one collective at a time, as NCCL does within one
# process group.
#
# We can change neither α nor β, and we have to send all the bytes. But we can send them in fewer all-reduces.

# %% [markdown]
# ## One flat tensor
#
# The simplest way to make fewer calls is to make only one. Copy all gradients into one **flat tensor**, a tensor with
# one dimension, all-reduce it, and copy the averages back.


# %%
# %%ranks
def average_flat(parameters):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    slices = flat.split([p.numel() for p in parameters])
    for p, grad_slice in zip(parameters, slices, strict=True):
        p.grad.copy_(grad_slice.view_as(p))


# %% [markdown]
# The next cell averages the same gradients both ways. Are the results equal, and what does the ledger say?


# %%
# %%ranks
def compute():
    model.zero_grad()
    model(inputs, targets).backward()


def gradients_after(average):
    compute()
    average()
    return torch.cat([p.grad.flatten() for p in parameters])


expected = gradients_after(by_hand.finish_gradient_sync)
with wire.ledger() as log:
    found = gradients_after(lambda: average_flat(parameters))
print(log.summary())
print("equal up to rounding:", torch.allclose(found, expected, atol=1e-6))
assert torch.allclose(found, expected, atol=1e-6)

# %% [markdown]
# There is one all-reduce instead of 100, with the same bytes and the same gradients. How long does it take, including
# the copying?

# %%
# %%ranks
ways = {
    "100 all-reduces": by_hand.finish_gradient_sync,
    "1 all-reduce": lambda: average_flat(parameters),
}
times = measure.jobs(ways, rounds=5)

# %% tags=["nbval-ignore-output"]
times = ranks.pull("times")[0]
measure.expect(times.ratio("100 all-reduces", "1 all-reduce") > 5, "one is much faster than 100")
plots.bars(times.ms(), "ms (median of 5 rounds)")

# %% [markdown]
# One α and the transfer of the bytes make 13 + 29 = 42 ms. So the copying costs almost nothing.

# %% [markdown]
# ## The second copy
#
# **Predict.** The gradients take 2.41 MB. How many MB do the gradients and the flat tensor take together at the peak?

# %%
my_prediction_mb = None

# %%
# %%ranks
from shared import memory


def peak_of(job):
    """Return the bytes that this rank holds at the peak of a job, by component."""
    with memory.peak(model) as peak:
        job()
    return peak.held.by_component()


held = {
    "100 all-reduces": peak_of(by_hand.finish_gradient_sync),
    "flat tensor": peak_of(lambda: average_flat(parameters)),
}

# %%
held = ranks.pull("held")[0]
gradient_bytes = held["100 all-reduces"]["gradients"]
both_bytes = held["flat tensor"]["gradients"] + held["flat tensor"]["buckets"]
print(f"{predicted(my_prediction_mb, '{} MB')}measured {both_bytes / 1e6:.2f} MB")
assert both_bytes == 2 * gradient_bytes

# %% [markdown]
# That is twice the size of the gradients: a rank holds every gradient once in `.grad` and once in the flat tensor. With
# 7 billion parameters in bf16, the second copy would take 14 GB.
#
# The solution is a **view**: a tensor that has no memory of its own, but uses part of another tensor's memory. What
# happens if each parameter's `.grad` is a view of the flat tensor when backward runs?

# %%
# %%ranks 0
a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1, 2))
flat = torch.zeros(4)
a.grad, b.grad = flat[:2], flat[2:].view(1, 2)
(3 * a.sum() + 5 * b.sum()).backward()
print(flat.tolist())

# %% [markdown]
# Backward adds to the `.grad` that it finds, so it writes directly into the flat tensor, and there is nothing to copy.
# The next cell does the same with the GPT:


# %%
# %%ranks
def grads_as_views(parameters):
    """Make each .grad a slice of one new flat tensor of zeros. Returns the flat tensor."""
    sizes = [p.numel() for p in parameters]
    flat = torch.zeros(sum(sizes))
    for p, grad_slice in zip(parameters, flat.split(sizes), strict=True):
        p.grad = grad_slice.view_as(p)
    return flat


flat = grads_as_views(parameters)
model(inputs, targets).backward()
held["views"] = peak_of(lambda: dist.all_reduce(flat))
assert torch.allclose(flat / world_size, expected, atol=1e-6)

# %% [markdown]
# In the three bars, compare the gradients with the flat tensor (labeled "buckets"):

# %%
held = ranks.pull("held")[0]
assert held["views"]["gradients"] + held["views"]["buckets"] == gradient_bytes
plots.memory_by_component(held)

# %% [markdown]
# With views, the second copy is gone. But a `.grad` remains a view only until something replaces it, as exercise 3.3 of
# the lab shows.

# %% [markdown]
# ## Several buckets
#
# A single flat tensor has a disadvantage that the ledger does not show: it is complete only when the *last* gradient
# is, so its all-reduce cannot start before backward ends.
#
# **Predict.** Which gradient does backward complete first: that of the token embedding, which is the model's first
# parameter, or that of the final norm, which is its last? Write "embedding" or "norm". The cell after your prediction
# registers a function that autograd calls with each parameter as soon as its gradient is complete.

# %%
my_prediction = None

# %%
# %%ranks
completed = []
handles = [
    p.register_post_accumulate_grad_hook(lambda _, name=name: completed.append(name))
    for name, p in model.named_parameters()
]
compute()
for handle in handles:
    handle.remove()
print("first:", completed[:3])
print("last: ", completed[-3:])

# %%
completed = ranks.pull("completed")[0]
print(f"{predicted(my_prediction)}the first is {completed[0]}, the last {completed[-1]}")
assert completed[0].startswith("norm.") and completed[-1] == "token_embedding.weight"

# %% [markdown]
# Backward goes through the layers in reverse, so the gradients of the last layers are complete first, and that of the
# token embedding comes last. The output layer uses the embedding's weight too, but the gradient of that weight is the
# sum over both uses, so it is complete only at the end.
#
# So we split the gradients into several flat tensors, starting at the end of the model. A **bucket** is a group of
# gradients that share one flat tensor and one all-reduce. The first bucket is complete early in backward. The **bucket
# cap** is the largest number of bytes that a bucket may hold. In the diagram, which shows another model and a cap of 20
# MB, follow the gradients from right to left:

# %%
diagrams.buckets()


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


buckets = in_buckets(parameters, cap_bytes=350 * 1024)
print([f"{sum(p.nbytes for p in bucket) / 1024:.0f} KiB" for bucket in buckets])
names = {p: name for name, p in model.named_parameters()}
bucket_names = [[names[p] for p in bucket] for bucket in buckets]
gradient_sizes = {name: p.nbytes for p, name in names.items()}

# %% [markdown]
# In the next figure, each row is a part of the model, such as a block, and its width shows the bytes of its gradients.
# Thin lines separate gradients. The buckets are numbered in the order in which they will be sent, from a strong color
# to a faint one.

# %%
gradient_sizes = ranks.pull("gradient_sizes")[0]
bucket_plots.bucket_map(gradient_sizes, ranks.pull("bucket_names")[0], "a cap of 350 KiB")

# %% [markdown]
# Every bucket except the last was closed because the next gradient did not fit.
#
# Some parameters need special care:
#
# | if a parameter | then | so |
# |---|---|---|
# | has another dtype or device | it cannot be in the same flat tensor | each dtype and device has its own buckets |
# | is tied (used twice) | it has one gradient, and `parameters()` returns it once | it is in one bucket |
# | is frozen | it never has a gradient | it is in no bucket |
# | is unused on some ranks | it has no `.grad` there | it counts as zeros, so a bucket has the same size on all ranks |

# %% [markdown]
# ## The short version
#
# `in_buckets` and `average_flat` are enough to train a model in which every parameter gets a gradient. `average_flat`
# frees its flat tensor, so only one bucket's gradients are held twice at a time. The next cell trains the MLP from
# chapter 02 twice with the same initial weights: once on the full batch without communication, and once on a quarter of
# each batch per rank, with two all-reduces (one per bucket) instead of six.


# %%
# %%ranks
from shared.data import digits
from shared.models import MLP

images, labels = digits(torch.float64)


def train(share, cap_bytes=None, steps=150):
    """Train on a share of each batch. With a cap, average the gradients over the ranks."""
    mlp, losses = MLP().double(), []
    buckets = in_buckets(list(mlp.parameters()), cap_bytes) if cap_bytes else []
    optimizer = torch.optim.Adam(mlp.parameters(), lr=3e-3)
    for step in range(steps):
        batch = torch.randperm(1500, generator=torch.Generator().manual_seed(step))[:128][share]
        loss = torch.nn.functional.cross_entropy(mlp(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        for bucket in buckets:
            average_flat(bucket)
        optimizer.step()
        losses.append(loss.item())
    accuracy = (mlp(images[1500:]).argmax(1) == labels[1500:]).double().mean().item()
    return losses, accuracy


alone = train(slice(None))
together = train(slice(rank, None, world_size), cap_bytes=150_000)

# %% tags=["nbval-ignore-output"]
(alone_losses, alone_accuracy), *_ = ranks.pull("alone")
together_losses, accuracies = zip(*ranks.pull("together"), strict=True)
mean_losses = [sum(of_step) / 4 for of_step in zip(*together_losses, strict=True)]
difference = max(abs(x - y) for x, y in zip(alone_losses, mean_losses, strict=True))
print(f"largest difference of the losses: {difference:.0e}")
print(f"accuracy on new digits: one process {alone_accuracy:.1%}, four ranks {accuracies[0]:.1%}")
assert difference < 1e-6 and alone_accuracy > 0.8 and abs(accuracies[0] - alone_accuracy) < 0.01

# %% [markdown]
# Four ranks train the same model as one process. Bucketing changes only how gradients are sent.

# %% [markdown]
# ## Choosing a cap
#
# We go back to the GPT with 100 parameters and try six caps, from "none" (each gradient is sent by itself) to 25 MiB
# (one bucket for all):

# %%
# %%ranks
caps_kib = {"none": 0, "30 KiB": 30, "100 KiB": 100, "350 KiB": 350, "1 MiB": 1024, "25 MiB": 25600}
by_cap = {cap: in_buckets(parameters, kib * 1024) for cap, kib in caps_kib.items()}
for cap, buckets in by_cap.items():
    total_bytes = sum(p.nbytes for bucket in buckets for p in bucket)
    print(f"{cap:>7}: buckets {len(buckets):>3}, {total_bytes:,} bytes in total")

# %% [markdown]
# **Predict.** Use the fitted α and β from your table above. With a cap of 350 KiB, there are 8 buckets with a total of
# 2.41 MB. How many milliseconds do their all-reduces take, one after the other?

# %%
my_prediction_ms = None


# %%
# %%ranks
def all_reduce_each(flats):
    for flat in flats:
        dist.all_reduce(flat)


def flat_of(bucket):
    return torch.zeros(sum(p.numel() for p in bucket))


flats = {cap: [flat_of(bucket) for bucket in buckets] for cap, buckets in by_cap.items()}
sending = {cap: lambda cap=cap: all_reduce_each(flats[cap]) for cap in flats}
logs = measure.recorded(sending, wire.ledger, rounds=5)
bucket_names = {cap: [[names[p] for p in b] for b in buckets] for cap, buckets in by_cap.items()}


# %% tags=["nbval-ignore-output"]
def run_of(cap, log, names):
    began_s = log.entries[0].launched_s
    spans_ms = [
        (1e3 * (e.launched_s - began_s), 1e3 * (e.completed_s - began_s)) for e in log.entries
    ]
    predicted_ms = sum(1e3 * fitted.message_s(entry.payload_bytes) for entry in log.entries)
    return bucket_plots.CapRun(cap, names, spans_ms, predicted_ms)


logs = {cap: of_ranks[0] for cap, of_ranks in ranks.pull("logs")[0].items()}
runs = {cap: run_of(cap, logs[cap], names) for cap, names in ranks.pull("bucket_names")[0].items()}
took_ms = {cap: run.took_ms for cap, run in runs.items()}
print(f"350 KiB: {predicted(my_prediction_ms, '{} ms')}measured {took_ms['350 KiB']:.0f} ms")
off = sorted(run.took_ms / run.predicted_ms for run in runs.values())
print(f"measured / formula: from {off[0]:.2f} to {off[-1]:.2f}")
measure.expect(1 / 1.6 < off[len(off) // 2] < 1.6, "the formula comes close")

# %% [markdown] tags=["introduction"]
# In the next figure, each row is a cap. The left half shows the model, split into its buckets. Within a row, the first
# bucket has the strongest color; rows with over 20 buckets alternate between two grays. In the right half, compare the
# measured times with the predicted ones.

# %% tags=["nbval-ignore-output"]
first_saved_ms = took_ms["none"] - took_ms["100 KiB"]
then_saved_ms = took_ms["100 KiB"] - took_ms["25 MiB"]
print(f"From no bucketing to 100 KiB, we save {first_saved_ms:.0f} ms.")
print(f"From there to one bucket, we save another {then_saved_ms:.0f} ms.")
measure.expect(first_saved_ms > then_saved_ms, "most is saved by the first buckets")
measure.expect(took_ms["25 MiB"] == min(took_ms.values()), "one bucket is the fastest")
widgets.cap_chooser(gradient_sizes, list(runs.values()))

# %% [markdown] tags=["open"]
# Each all-reduce that a larger cap avoids saves one α, about 13 ms, and nothing else. When does that no longer help
# much? At α/β bytes, latency and transfer cost the same. A bucket k times that size pays 1/k extra:

# %% tags=["nbval-ignore-output"]
even_bytes = fitted.alpha_s / fitted.beta_s_per_byte
rows = [[f"{k} α/β", f"{k * even_bytes / 1e6:.2f}", f"{1 / k:.0%}"] for k in (1, 3, 10, 30)]
note = f"The model has {gradient_bytes / 1e6:.2f} MB of gradients."
assert gradient_bytes < 10 * even_bytes
tables.Table(["bucket", "MB", "latency adds"], rows, note)

# %% [markdown]
# At 10 α/β bytes, the latency adds 10% to the transfer, so it is 1/11 of the total. From there on, a larger cap can
# save at most that 1/11. As long as buckets are sent after backward, a single bucket is fastest.
#
# But a larger cap has a price. In chapter 04, buckets are sent during backward, and two of them then matter most: the
# first, because nothing is sent until it is full, and the last, because nothing is left to hide it.
#
# > **Found in the wild.** torch's DDP has one small bucket of 1 MiB. Is it the first or the last? `distributed.py` of
# > torch 2.13 says both: it is for "parameters that are defined first", whose gradients come last, and it is "to reduce
# > latency for early-computed gradients". In PyTorch issue 48880, a maintainer says that it is the last one. But the
# > small bucket in that issue has 2,052,000 bytes, and these are the 513,000 parameters of ResNet-18's output layer. So
# > it is the *first*: from step 2 on, DDP fills buckets in the order in which gradients became ready, and starts with
# > the small one. `DDP_SET_LAST_BUCKET_CAP=1` makes it the last. Look for it in the next ledger.

# %% [markdown]
# ## The production version
#
# In torch's DDP, the argument `bucket_cap_mb` is the cap in MiB (2²⁰ bytes). Its default is 25 MiB. With this default,
# one bucket has a smaller cap of 1 MiB. If you choose another cap, DDP uses it for all buckets. What does DDP send in
# its first three steps?

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel


def show_collectives(module, steps=3, **options):
    ddp = DistributedDataParallel(module, **options)
    for step in range(1, steps + 1):
        with wire.ledger() as log:
            ddp(inputs, targets).backward()
        sent = [f"{e.op} {e.payload_bytes:,} B ({e.dtype})" for e in log.entries]
        print(f"step {step}:", "; ".join(sent))


show_collectives(TinyGPT(config))

# %% [markdown]
# - **Step 1** uses a single bucket, because DDP does not yet know in which order backward completes the gradients. It
#   records that order.
# - **At the start of step 2**, each rank assigns the gradients to buckets in the recorded order. Rank 0 broadcasts its
#   **bucket assignment**, the list that says which gradient is in which bucket, so that all ranks use the same one. The
#   first broadcast sends 100 indices and the number of buckets (101 · 4 bytes). The second sends the number of
#   gradients in each of the two buckets (2 · 4 bytes).
# - **The first bucket is larger than its cap** of 1,048,576 bytes. DDP closes a bucket once it has *reached* its cap,
#   so the last gradient may push it over the cap (PyTorch issue 48880). Our function closes a bucket before that
#   happens.
#
# Does the recorded order matter? Here is a model that registers its last layer first. With a tiny cap, each gradient
# has its own bucket from step 2 on:


# %%
# %%ranks
class LastFirst(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(64, 1, bias=False)  # 256 bytes
        self.first = torch.nn.Embedding(config.vocab_size, 64)

    def forward(self, tokens, targets):
        return self.last(self.first(tokens)).mean()


odd = LastFirst()
print("ours:", [sum(p.nbytes for p in bucket) for bucket in in_buckets(list(odd.parameters()), 0)])
show_collectives(odd, bucket_cap_mb=1e-4)

# %% [markdown]
# Our order would send the large gradient of the embedding first, although backward completes it last. From step 2 on,
# DDP sends the gradient of the last layer first.
#
# By default, DDP also holds a second copy of every gradient. With `gradient_as_bucket_view=True`, gradients are views
# of its buckets:

# %%
# %%ranks
held = {}
for as_view in (False, True):
    ddp = DistributedDataParallel(TinyGPT(config), gradient_as_bucket_view=as_view)
    ddp(inputs, targets).backward()
    held[f"gradient_as_bucket_view={as_view}"] = memory.held(ddp).by_component()

# %%
held = ranks.pull("held")[0]
copied, viewed = held.values()
assert copied["buckets"] == copied["gradients"] == gradient_bytes and viewed["buckets"] == 0
plots.memory_by_component(held)

# %% [markdown]
# This saves the memory, but not always the copying. By default, `zero_grad()` sets `.grad` to None, so backward
# allocates a new tensor for each gradient. As soon as a gradient is complete, DDP copies it into its bucket, frees that
# tensor, and makes `.grad` a view again. After `zero_grad(set_to_none=False)`, `.grad` is still a view, so backward
# writes into the bucket.

# %% [markdown]
# ## Real links
#
# How large should a bucket be on a real link? For a ring of N ranks, divide the α of an all-reduce by its β. With the α
# and β of one message, this is
#
# $$\frac{\alpha_\text{all-reduce}}{\beta_\text{all-reduce}}
# = \frac{2(N-1)\,\alpha}{\frac{2(N-1)}{N}\,\beta} = N \cdot \frac{\alpha}{\beta}$$
#
# So the more ranks there are, the larger the buckets have to be. The next table shows the α/β of an all-reduce for real
# links:

# %%
from shared.planner.links import REAL_LINKS

rows = []
for link in REAL_LINKS:
    even_mb = link.gpus * link.alpha_s / link.beta_s_per_byte / 1e6
    rows.append([link.name, f"{link.gpus}", f"{even_mb:.1f}", f"{10 * even_mb:.0f}"])
note = "α/β of an all-reduce in a ring. shared/planner/links.py has the sources."
tables.Table(["link", "GPUs", "α/β, MB", "10 α/β, MB"], rows, note)

# %% [markdown]
# This table is for buckets that nothing hides. Once communication runs behind backward (chapter 04), a latency that is
# hidden costs nothing. Even so, a developer of torch finds 25 MiB too small, and proposes 100 MB (PyTorch issue
# 118421). Megatron-Core's default on N ranks is max(40 million, 1 million · N) parameters in a bucket, so that
# collectives "do not become latency-bound". If it does not overlap them with backward, it uses a single bucket: the
# choice that was fastest here.

# %% [markdown]
# ## Recap
#
# S is the size of all gradients in bytes, and N the number of ranks.
#
# Every version sends 2(N−1)/N · S bytes per rank. torch's DDP sends them during backward, the others after it.
#
# | | memory for gradients | all-reduces |
# |---|---|---|
# | `ManualDDP` | S | one per parameter |
# | one flat tensor, copied | 2S at the peak | 1 |
# | buckets, copied one by one | S plus one bucket at the peak | one per bucket |
# | buckets, gradients stay views | S | one per bucket |
# | the lab's `BucketedDDP` | 2S at the peak¹ | one per bucket |
# | torch's DDP | 2S; S with `gradient_as_bucket_view=True`² | one per bucket |
#
# ¹ After `zero_grad()`, backward allocates every gradient anew, in addition to the buckets. ² The peak is S plus one
# gradient, because DDP frees each gradient once it is in its bucket.
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
# Here is a step of the GPT with a cap of 350 KiB, on the rank that finished backward last. The others waited for it in
# their first all-reduce. Look at when the all-reduces begin.


# %%
# %%ranks
def bucketed_step():
    compute()
    for bucket in by_cap["350 KiB"]:
        average_flat(bucket)


steps = {"step": bucketed_step}
lines = measure.recorded(steps, lambda: timeline.record(model), rounds=5)["step"]

# %% tags=["nbval-ignore-output"]
lines = ranks.pull("lines")[0]
measure.expect(all(line.overlap < 0.1 for line in lines), "nothing overlaps")
last = max(lines, key=lambda line: line.lane("communication")[0])
plots.timeline([last], exposed=False)

# %% [markdown]
# There are only eight all-reduces now, but all of them come after backward. While they are in flight, the rank computes
# nothing. Yet the gradients of the first bucket were complete long before. Chapter 04 sends them right then.
#
# First, you build the wrapper `BucketedDDP` in the lab. To watch buckets outside a notebook, run `torchrun
# --nproc_per_node=2 labs/gradient_sync_visualizer.py`.

# %%
ranks.stop()
