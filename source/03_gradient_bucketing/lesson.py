# ---
# jupyter:
#   course:
#     module: bucketed_ddp
#     minutes: 25
# ---

# %% [markdown]
# # 03 · Gradient bucketing
#
# **25 minutes.** You will be able to
#
# - split the time of a synchronisation into *messages* and *bytes*, with two numbers that you fit,
# - put gradients into flat buckets, and save the second copy that a bucket costs,
# - predict what a cap costs before you run it, and say where torch's buckets differ from yours.
#
# You need α and β of chapter 01, and `ManualDDP` of chapter 02.

# %% [markdown]
# ## What is wasted
#
# Chapter 02 ended with one message per parameter. Its GPT had two blocks; here is one with twelve.

# %% tags=["nbval-ignore-output"]
from shared import formulas, plots, ranks, tables, widgets
from shared.plots import buckets as bucket_plots

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from shared import wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.manual_ddp import ManualDDP

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=12)
inputs, targets = (batch.to(device) for batch in text.windows(range(rank, 400, 100), length=32))
model = TinyGPT(config, seed=rank).to(device)
by_hand = ManualDDP(model)
print(f"{sum(p.numel() for p in model.parameters()):,} parameters")

# %%
# %%ranks
by_hand(inputs, targets).backward()
with wire.ledger() as log:
    by_hand.finish_gradient_sync()
print(log.summary())

# %% [markdown]
# A hundred messages. How long do they take? Jobs are timed in turn, so that what disturbs one disturbs all:


# %%
# %%ranks
import time
from statistics import median


def took_ms(job):
    dist.barrier()
    began_s = time.perf_counter()
    job()
    if device.type == "cuda":
        torch.cuda.synchronize()  # a GPU still works when a call has returned
    return 1e3 * (time.perf_counter() - began_s)


def typical_ms(jobs, rounds=5):
    """→ {name of a job: the median of its rounds, without the first}"""
    times = [[took_ms(job) for job in jobs.values()] for _ in range(1 + rounds)][1:]
    return dict(zip(jobs, map(median, zip(*times, strict=True)), strict=True))


# %%
# %%ranks
def compute():
    model.zero_grad()
    model(inputs, targets).backward()


def compute_and_sync():
    compute()
    by_hand.finish_gradient_sync()


step_ms = typical_ms({"forward + backward alone": compute, "with ManualDDP": compute_and_sync})


# %% tags=["nbval-ignore-output"]
def slowest_rank(name):
    """→ {name of a job: its time on the rank that needed longest}"""
    of_ranks = ranks.pull(name)
    return {job: max(times[job] for times in of_ranks) for job in of_ranks[0]}


step_ms, log = slowest_rank("step_ms"), ranks.pull("log")[0]
alone_ms, synced_ms = step_ms.values()
none, all_of_them = ["0", "0 MB"], [f"{log.messages}", f"{log.sent_bytes / 1e6:.1f} MB"]
rows = [
    [name, *sent, f"{ms:.0f}"]
    for (name, ms), sent in zip(step_ms.items(), (none, all_of_them), strict=True)
]
tables.Table(["", "messages per step", "sent per rank", "ms"], rows)

# %% [markdown]
# What should that many bytes take? Chapter 01 fitted α, the seconds of a message, and β, the seconds of a byte, to
# the steps of a ring. Here the message is a whole `all_reduce`, ten in a row, of a few sizes.

# %%
# %%ranks
from functools import partial


def ten_times(tensor):
    for _ in range(10):
        dist.all_reduce(tensor)


sizes_bytes = (64, 1_024, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)
tensors = [torch.zeros(size // 4, device=device) for size in sizes_bytes]
jobs = {tensor.nbytes: partial(ten_times, tensor) for tensor in tensors}
ten_ms = typical_ms(jobs)

# %% tags=["nbval-ignore-output"]
import torch


def fit(times_ms):
    """Least squares of (α + β · bytes) / measured − 1. → α, β"""
    sizes = torch.tensor(list(times_ms), dtype=torch.float64)
    measured = torch.tensor(list(times_ms.values()), dtype=torch.float64)
    columns = torch.stack([torch.ones_like(sizes), sizes], dim=1) / measured[:, None]
    return torch.linalg.lstsq(columns, torch.ones_like(columns[:, :1])).solution.flatten().tolist()


alpha_ms, beta_ms = fit({size: ms / 10 for size, ms in slowest_rank("ten_ms").items()})
print(f"α = {alpha_ms:.2f} ms per message, β = {1e6 * beta_ms:.2f} ms per MB")
print(f"{log.payload_bytes / 1e6:.2f} MB should take {beta_ms * log.payload_bytes:.0f} ms,")
print(f"and the synchronisation took {synced_ms - alone_ms:.0f} ms")
assert alpha_ms > 0 and beta_ms > 0

# %% [markdown]
# Where does the rest go?
#
# **Predict.** Send the hundred messages again, but let each carry as little as the smallest gradient, 64 numbers. How
# many milliseconds do they take? Write yours before you run the next cell.

# %%
my_prediction_ms = 0.0

# %%
# %%ranks
small = torch.zeros(64, device=device)


def hundred_small():
    for _ in range(100):
        dist.all_reduce(small)


jobs = {"1 small message": lambda: dist.all_reduce(small), "100 small messages": hundred_small}
many_ms = typical_ms(jobs | {"100 gradients": by_hand.finish_gradient_sync})

# %% tags=["nbval-ignore-output"]
many_ms = slowest_rank("many_ms")
print(f"predicted {my_prediction_ms:.0f} ms, measured {many_ms['100 small messages']:.0f} ms")
assert many_ms["100 small messages"] > 5 * many_ms["1 small message"]
plots.bars(many_ms, "ms (slowest rank, median of 5)")

# %% [markdown]
# So most of the time is not *bytes*; it is *messages*. The cure is in that sentence: send the same bytes in
# fewer messages. (Compare bars of one figure: from cell to cell the pace of a shared machine changes.)

# %% [markdown]
# ## One message
#
# The simplest way: copy all gradients into one flat tensor, send that, copy back.


# %%
# %%ranks
def average_flat(parameters):
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat)
    flat /= world_size
    pieces = flat.split([p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces, strict=True):
        p.grad.copy_(piece.view_as(p))


# %%
# %%ranks
parameters = list(model.parameters())
compute()
own = [p.grad.clone() for p in parameters]
with wire.ledger() as log:
    average_flat(parameters)
print(log.summary())

# %% [markdown]
# The same bytes as before. The same gradients?

# %%
# %%ranks
flat_averaged = [p.grad.clone() for p in parameters]
for p, gradient in zip(parameters, own, strict=True):
    p.grad.copy_(gradient)
by_hand.finish_gradient_sync()
apart = max((p.grad - g).abs().max() for p, g in zip(parameters, flat_averaged, strict=True))
print(f"equal up to rounding: {(apart < 1e-6).item()}")
assert apart < 1e-6

# %%
# %%ranks
flat_ms = typical_ms(
    {
        "100 messages": by_hand.finish_gradient_sync,
        "1 message, copies included": partial(average_flat, parameters),
    }
)

# %% tags=["nbval-ignore-output"]
flat_ms = slowest_rank("flat_ms")
assert flat_ms["100 messages"] > 1.5 * flat_ms["1 message, copies included"]
plots.bars(flat_ms, "ms (slowest rank, median of 5)")

# %% [markdown]
# Is that all? Ask the memory ledger what this rank holds while it sends.
#
# **Predict.** The gradients are 2.41 MB. How many MB of gradients *and* buckets are there at the peak?

# %%
my_prediction_mb = 0.0

# %%
# %%ranks
from shared import memory


def peak_of(job):
    """→ what this rank holds when it holds most, by component"""
    with memory.peak(model) as peak:
        job()
    return peak.held.by_component()


held = {"each by itself": peak_of(by_hand.finish_gradient_sync)}
held["flat, copied"] = peak_of(partial(average_flat, parameters))

# %%
held = ranks.pull("held")[0]
gradients_bytes = held["each by itself"]["gradients"]
both_bytes = held["flat, copied"]["gradients"] + held["flat, copied"]["buckets"]
print(f"predicted {my_prediction_mb:g} MB, measured {both_bytes / 1e6:.2f} MB")
assert both_bytes == 2 * gradients_bytes

# %% [markdown]
# Twice the gradients: once in `.grad`, once in the flat tensor.

# %% [markdown]
# ## A view instead of a copy
#
# A tensor can be a *view*: a window on another's memory. Let a parameter's `.grad` be a window on the flat tensor, and
# run a backward. What stands in the flat tensor?

# %%
# %%ranks 0
a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(1, 2))
flat = torch.zeros(4)
a.grad, b.grad = flat[:2], flat[2:].view(1, 2)
(3 * a.sum() + 5 * b.sum()).backward()
print(flat.tolist())

# %% [markdown]
# Backward *adds* to the `.grad` that it finds: straight into the flat tensor. Nothing to copy, in or out.


# %%
# %%ranks
def into_views(parameters):
    """Move gradients into one flat tensor; each .grad becomes its part of it. → the flat tensor"""
    flat = torch.cat([p.grad.flatten() for p in parameters])
    pieces = flat.split([p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces, strict=True):
        p.grad = piece.view_as(p)
    return flat


flat = into_views(parameters)
held["flat, views"] = peak_of(lambda: dist.all_reduce(flat))

# %%
held = ranks.pull("held")[0]
assert held["flat, views"] == held["each by itself"]
plots.memory_by_component(held)

# %% [markdown]
# The copy is saved. (Each bar is a synchronisation, so there are no activations in it.)
#
# A view stays one only as long as nobody puts another tensor into `.grad`. Somebody does, in every training loop. You
# will find out who in the lab.

# %% [markdown]
# ## Several messages
#
# One flat tensor has a flaw that no ledger of bytes shows: it is complete when the *last* gradient is.
#
# **Predict.** Which gradients does backward complete first: those of the embedding, the first parameter, or those of
# the final LayerNorm, the last one? A *hook*, a function that autograd calls, writes down the order.

# %%
my_prediction = "?"

# %%
# %%ranks
came = []
hooks = [
    p.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
    for name, p in model.named_parameters()
]
compute()
for hook in hooks:
    hook.remove()
print("first", came[:3])
print("last ", came[-3:])

# %%
came = ranks.pull("came")[0]
print(f"predicted {my_prediction}, first came {came[0]}, last {came[-1]}")
assert came[0].startswith("norm.") and came[-1] == "token_embedding.weight"

# %% [markdown]
# The last layers come first. The embedding comes last, and not only because it stands first: it is *tied* to the
# output layer, and its gradient is the sum of both.
#
# So cut the flat tensor into **buckets**, from the model's end: then a bucket is complete, and could leave, long
# before backward is done. A **cap** says how many bytes a bucket may hold.


# %%
# %%ranks
def in_buckets(parameters, cap_bytes):
    """→ lists of parameters, from the last one on, of at most cap_bytes each (or one parameter)"""
    buckets, room_bytes = [], 0
    for p in reversed(parameters):
        if p.nbytes > room_bytes:
            buckets.append([])
            room_bytes = cap_bytes
        buckets[-1].append(p)
        room_bytes -= p.nbytes
    return buckets


buckets = in_buckets(parameters, cap_bytes=350 * 1024)
print([f"{sum(p.nbytes for p in bucket) / 1024:.0f} KiB" for bucket in buckets])

# %% [markdown]
# The same on the model. A row is a part of it, as wide as its gradients; a number is a bucket, in the order of sending.

# %%
# %%ranks
names = {p: name for name, p in model.named_parameters()}
gradient_bytes = {name: p.nbytes for p, name in names.items()}
bucket_names = [[names[p] for p in bucket] for bucket in buckets]

# %%
gradient_bytes = ranks.pull("gradient_bytes")[0]
bucket_plots.bucket_map(gradient_bytes, ranks.pull("bucket_names")[0], "a cap of 350 KiB")

# %% [markdown]
# Three things to see. No bucket is quite full: the next gradient did not fit. The last one is *partial*: it has what
# was left. And the gradients of one block may travel in two buckets; nobody minds.
#
# A fourth is not in the picture: a library makes the **first bucket smaller** than the others. It is full sooner, so
# the wire has work early.

# %% [markdown]
# ## Who may not travel together?
#
# A flat tensor has one dtype. What becomes of a bfloat16 gradient beside a float32 one? And how many gradients has a
# tied weight, one or two?

# %%
# %%ranks
mixed = [torch.zeros(1000, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)]
flat = torch.cat(mixed)
print(f"{sum(g.nbytes for g in mixed):,} bytes became {flat.nbytes:,}, all {flat.dtype}")
print(f"{len(model.state_dict())} names, {len(parameters)} parameters")

# %% [markdown]
# | a parameter that is | | so |
# |---|---|---|
# | of another dtype or device | would be converted: more bytes, other rounding | each dtype and device has its own |
# | tied | `parameters()` gives it once, with one gradient | nothing to do: one place in one bucket |
# | frozen | never has a gradient | it is in no bucket |
# | unused on one rank | `.grad` is None there, and not elsewhere | it counts as zeros: all ranks send alike |

# %% [markdown]
# ## Which cap?
#
# The bytes stay the same, so the model of chapter 01 says, for buckets of $S_1, S_2, \dots$ bytes,
#
# $$T = \sum_i\,(\alpha + \beta S_i) = \text{messages}\cdot\alpha + \beta S$$

# %%
# %%ranks
caps_kib = {"none": 0, "30 KiB": 30, "100 KiB": 100, "350 KiB": 350, "1 MiB": 1024, "25 MiB": 25600}
by_cap = {cap: in_buckets(parameters, kib * 1024) for cap, kib in caps_kib.items()}
for cap, buckets in by_cap.items():
    print(
        f"{cap:>7}: {len(buckets):>3} buckets, {sum(p.nbytes for b in buckets for p in b):,} bytes"
    )

# %% [markdown]
# **Predict.** With your α and β, how many milliseconds does a cap of 350 KiB take? And which cap is the fastest?

# %%
my_prediction_ms, my_fastest = 0.0, "?"

# %% [markdown]
# Every cap is run five times, in turn. The messages of each one's median run are kept.


# %%
# %%ranks
def send(flats):
    dist.barrier()
    with wire.ledger() as log:
        for flat in flats:
            dist.all_reduce(flat)
    return log


def flat(bucket):
    return torch.cat([p.grad.flatten() for p in bucket])


flats = {cap: [flat(bucket) for bucket in buckets] for cap, buckets in by_cap.items()}
rounds = [{cap: send(flats[cap]) for cap in flats} for _ in range(6)][1:]


# %%
# %%ranks
def median_run(logs):
    return sorted(logs, key=lambda log: log.total_ms)[len(logs) // 2]


logs = {cap: median_run([each[cap] for each in rounds]) for cap in caps_kib}
bucket_names = {cap: [[names[p] for p in b] for b in buckets] for cap, buckets in by_cap.items()}


# %% tags=["nbval-ignore-output"]
def run_of(cap, log, buckets):
    def ms(at_s):
        return 1e3 * (at_s - log.entries[0].launched_s)

    spans_ms = [(ms(entry.launched_s), ms(entry.completed_s)) for entry in log.entries]
    predicted_ms = sum(alpha_ms + beta_ms * entry.payload_bytes for entry in log.entries)
    return bucket_plots.CapRun(cap, buckets, spans_ms, predicted_ms)


logs, buckets_of = ranks.pull("logs")[0], ranks.pull("bucket_names")[0]
runs = {cap: run_of(cap, log, buckets_of[cap]) for cap, log in logs.items()}
print(f"350 KiB: predicted {my_prediction_ms:.0f} ms, measured {runs['350 KiB'].took_ms:.0f} ms")
print(f"fastest: predicted {my_fastest}, measured {min(runs, key=lambda cap: runs[cap].took_ms)}")

# %% tags=["nbval-ignore-output"]
off = sorted(run.took_ms / run.predicted_ms for run in runs.values())
print(f"measured / predicted: from {off[0]:.1f} to {off[-1]:.1f}")
assert 1 / 3 < off[len(off) // 2] < 3
assert runs["none"].took_ms > 1.5 * runs["25 MiB"].took_ms
widgets.cap_chooser(gradient_bytes, list(runs.values()))

# %% [markdown]
# (In JupyterLab, run the cell: choose a cap, and see its buckets and its messages in time.)
#
# Larger caps win, and win less and less. Where does that end? A bucket of α/β bytes pays as much for being a
# message as for its bytes; one of ten times that, a tenth more.

# %% tags=["nbval-ignore-output"]
even_bytes = alpha_ms / beta_ms
print(f"α/β = {even_bytes / 1e3:.0f} KB; a tenth more from {even_bytes / 1e5:.1f} MB on")

# %% [markdown]
# From there on a larger cap gains little. It has a price, too: the first bucket leaves later. As long as everything is
# sent *after* backward, as here, that price is not paid, and one bucket is best. Chapter 04 pays it.

# %% [markdown]
# ## The production version
#
# torch's DDP has `bucket_cap_mb`, in MB of 2²⁰ bytes. By default it is 25, after a first bucket of 1. What does it
# send in the first three steps?


# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel


def messages_of(module, steps=3, **options):
    ddp = DistributedDataParallel(module, **options)
    for step in range(1, steps + 1):
        with wire.ledger() as log:
            ddp(inputs, targets).backward()
        sent = [f"{e.op} {e.payload_bytes:,}" for e in log.entries]
        print(f"step {step}:", "; ".join(sent))


messages_of(TinyGPT(config).to(device))

# %% [markdown]
# - **Step 1** is one message, after all of backward: DDP does not know yet in which order gradients come.
# - **In step 2** rank 0 broadcasts new buckets, made in the order in which gradients *came* in step 1. Ours rely on the
#   order of `parameters()`.
# - **The first bucket is over its cap**: 1 MB is 2²⁰ = 1,048,576 bytes. DDP closes a bucket once it is at or over its
#   cap; ours closes it before.
#
# Does the second point matter? Here is a model whose last layer is registered first:


# %%
# %%ranks
class LastFirst(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(64, 1, bias=False)  # 256 bytes
        self.first = torch.nn.Embedding(config.vocab_size, 64)

    def forward(self, tokens, targets):
        return self.last(self.first(tokens)).mean()


odd = LastFirst().to(device)
print("ours:", [sum(p.nbytes for p in bucket) for bucket in in_buckets(list(odd.parameters()), 0)])
messages_of(odd, bucket_cap_mb=1e-4)

# %% [markdown]
# Ours would wait for the embedding before it sends the last layer; DDP, from its second step on, does not. (With a
# `bucket_cap_mb` of your own, that is the first bucket's cap too.)
#
# And the second copy? DDP saves it if you ask for it, with `gradient_as_bucket_view=True`:

# %%
# %%ranks
held = {}
for as_view in (False, True):
    ddp = DistributedDataParallel(TinyGPT(config).to(device), gradient_as_bucket_view=as_view)
    ddp(inputs, targets).backward()
    held[f"as view: {as_view}"] = memory.held(ddp).by_component()

# %%
held = ranks.pull("held")[0]
assert held["as view: False"]["buckets"] == held["as view: False"]["gradients"] == gradients_bytes
assert held["as view: True"]["buckets"] == 0
plots.memory_by_component(held)

# %% [markdown]
# Source: Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020
# (arXiv 2006.15704), §3.2. It begins where you did: the same bytes, all-reduced in fewer and fewer messages.

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32, so 4Ψ bytes of gradients; N ranks; S = 4Ψ.
#
# | | memory for gradients | messages | sent per rank and step | overlap |
# |---|---|---|---|---|
# | `ManualDDP` | 4Ψ | one per parameter | 2(N−1)/N · S | none |
# | flat, copied | 4Ψ, + 4Ψ while it sends | 1 | 2(N−1)/N · S | none |
# | buckets, copied | 4Ψ, + one bucket at a time | one per bucket | 2(N−1)/N · S | not yet |
# | buckets, views | 4Ψ¹ | one per bucket | 2(N−1)/N · S | not yet |
# | torch's DDP | 4Ψ, + 4Ψ of buckets² | one per bucket | 2(N−1)/N · S | yes |
#
# ¹ As long as `.grad` is a view when backward comes. The lab measures what else can happen.<br>
# ² None with `gradient_as_bucket_view=True`.

# %%
sent_bytes = formulas.all_reduce_sent_bytes(gradients_bytes, ranks=4)
for log in logs.values():
    log.assert_volume(payload_bytes=gradients_bytes, sent_bytes=sent_bytes)
print(f"{sent_bytes / 1e6:.2f} MB sent by each rank, whatever the cap")

# %% [markdown]
# ## What is still wasted
#
# The timeline of a step, with buckets of 350 KiB:

# %%
# %%ranks
from shared import timeline

for _ in range(2):  # the second counts
    model.zero_grad()
    dist.barrier()
    with timeline.record(model) as line:
        model(inputs, targets).backward()
        for bucket in by_cap["350 KiB"]:
            average_flat(bucket)

# %% tags=["nbval-ignore-output"]
lines = ranks.pull("line")
assert all(line.overlap < 0.1 for line in lines)
plots.timeline(lines)

# %% [markdown]
# Few messages now, but all of them come after backward: what is *exposed* is all of the communication. And the
# gradients of the first bucket had been there since backward's beginning. They could have left then. That is
# chapter 04.
#
# First build it: in the lab you write `BucketedDDP`. To see buckets outside a notebook:
# `torchrun --nproc_per_node=2 labs/gradient_sync_visualizer.py`.

# %%
ranks.stop()
