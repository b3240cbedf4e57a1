# ---
# jupyter:
#   course:
#     module: overlapped_ddp
#     minutes: 35
# ---

# %% [markdown]
# # 04 · Overlap
#
# **35 minutes.** You will be able to
#
# - send gradients while backward still computes, and predict what stays exposed from a run's own figures,
# - say why all ranks must launch in one order, and what happens where they do not,
# - measure what communication really costs: against the same step without messages.
#
# You need chapter 01 (α, β and the ring) and chapter 03: `Bucket` and `BucketedDDP`.

# %% [markdown]
# ## What is wasted
#
# Chapter 03 left a handful of messages. Inside one machine no network holds them up: what they take is mostly cores,
# which the ranks need for computing as well. So give each rank a host of its own, behind a network link of 1 Gbit/s: a
# megabyte takes 8 ms.

# %% tags=["nbval-ignore-output"]
from shared import formulas, hosts, plots, ranks, tables
from shared.plots import scaling as scaling_plots

why_not = hosts.why_not()
link = None if why_not else "1gbit"
ranks.start(world_size=4, backend="gloo:cpu", detect_mismatch=False, link=link)
print(why_not or "The links are real: the kernel keeps their rate.")

# %% [markdown]
# (On the CPU even where there are GPUs: it is the link that we look at.) Not every machine lets us make such hosts.
# Where it does not, a link is *emulated*: messages are as fast as ever, but end only when a link would have carried
# them.

# %% tags=["nbval-ignore-output"]
# %%ranks
import contextlib
import os

from shared import hosts
from shared.hosts import emulated

emulation = contextlib.ExitStack()
if hosts.HOST_FILE not in os.environ:  # this rank is no host of its own
    emulation.enter_context(emulated.link("1gbit", latency_ms=0.1))

# %% [markdown]
# Chapter 01 had a formula for the ring: $2(N-1)\,\alpha + \frac{2(N-1)}{N}\,S\,\beta$. Here β is given, 8 ns per byte.
# α is a sixth of what an all-reduce of one number takes, for it has 2(N−1) = 6 steps. Does the
# formula hold on these links?

# %%
# %%ranks
import time


def fastest_all_reduce_s(size_bytes, rounds):
    tensor, times = torch.zeros(size_bytes // 4, device=device), []
    for _ in range(rounds):
        dist.barrier()
        began_s = time.perf_counter()
        dist.all_reduce(tensor)
        tensor[0].item()  # a GPU still works when a call has returned
        times.append(time.perf_counter() - began_s)
    return min(times)


one_number_s = fastest_all_reduce_s(4, rounds=40)
fastest_s = [fastest_all_reduce_s(1_000_000 * size_mb, rounds=6) for size_mb in (1, 4, 10)]

# %% tags=["nbval-ignore-output"]
alpha_s, beta_s = max(ranks.pull("one_number_s")) / (2 * 3), 8 / 1e9
rows = []
for size_mb, measured_s in zip((1, 4, 10), map(max, *ranks.pull("fastest_s")), strict=True):
    formula_s = formulas.ring_all_reduce_s(1e6 * size_mb, 4, alpha_s, beta_s)
    assert 0.75 < measured_s / formula_s < 1.25
    ratio = f"{measured_s / formula_s:.2f}"
    rows.append([f"{size_mb} MB", f"{1e3 * formula_s:.1f}", f"{1e3 * measured_s:.1f}", ratio])
note = f"α = {1e6 * alpha_s:.0f} µs, β = {1e9 * beta_s:g} ns per byte"
tables.Table(["all-reduce", "formula, ms", "measured, ms", "ratio"], rows, note)

# %% [markdown]
# It does. Next, the computing. Here ranks share the cores of one machine, and sending needs cores too; a GPU would need
# none. So each block of the model gets a *stand-in* for a GPU: besides what it really computes, it sleeps for as long
# as a device might work, 8 ms in forward and 16 ms in backward. Sleeping takes no core.


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

text = CharTokens()
text.tokens = text.tokens.to(device)
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
sample = text.windows(
    [1000 * rank], length=16
)  # this rank's own, and short: sleeping is most of the step


def new_model():
    model = TinyGPT(config).to(device)
    for block in model.blocks:
        block.register_forward_hook(lambda block, inputs, output: OnDevice.apply(output))
    return model


print(f"{4 * sum(p.numel() for p in new_model().parameters()) / 1e6:.1f} MB of gradients")

# %% [markdown]
# With the buckets of chapter 03, one step of this GPT sends seven messages.
#
# **Predict.** How many milliseconds is such a step longer than one without messages? You have S, N and β.

# %%
my_prediction_ms = 0.0


# %%
# %%ranks
from shared import timeline
from solutions.bucketed_ddp import BucketedDDP


def finish(model):
    if hasattr(model, "finish_gradient_sync"):  # torch's DDP has none
        model.finish_gradient_sync()


def step(model):
    """One forward and backward, recorded on this rank. → Timeline"""
    model.zero_grad()
    dist.barrier()
    with timeline.record(model) as line:
        model(*sample).backward()
        finish(model)
    return line


bucketed = BucketedDDP(new_model(), bucket_cap_mb=2.0)
lines = [step(bucketed) for _ in range(5)]


# %% tags=["nbval-ignore-output"]
def fastest(lines):
    """→ of a rank's steps, the one that was disturbed least"""
    return min(lines, key=lambda line: line.ended_s - line.began_s)


lines = ranks.pull("lines")
before = fastest(lines[0])
assert all(line.overlap < 0.1 for of_rank in lines for line in of_rank)
print(f"predicted {my_prediction_ms:.0f} ms, measured {before.exposed_ms:.0f} ms")
plots.timeline([before])

# %% [markdown]
# Seven buckets, all launched when backward is over; each row ends where its bucket has arrived. Until then rank 0
# computes nothing: *exposed* communication. The formula's share of it is 129 ms + 42α; what is more is waiting for
# ranks that came later.
#
# Yet the last layers' gradients were complete early on. Backward begins with them.

# %% [markdown]
# ## The obvious cure
#
# Send each gradient as soon as it is there. autograd tells us: `register_post_accumulate_grad_hook` calls a function
# with the parameter, once backward has put all into its `.grad`.


# %%
# %%ranks
from functools import partial

from torch import nn


class ImpatientDDP(nn.Module):
    """Each gradient is averaged the moment it is there."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)

    def forward(self, *inputs):
        return self.module(*inputs)


# %% [markdown]
# **Predict.** The messages now come during backward. How many milliseconds are exposed?

# %%
my_prediction_ms = 0.0

# %%
# %%ranks
impatient = ImpatientDDP(new_model())
lines = [step(impatient) for _ in range(5)]

# %% tags=["nbval-ignore-output"]
lines = ranks.pull("lines")
impatient = fastest(lines[0])
assert impatient.overlap < 0.5
print(f"predicted {my_prediction_ms:.0f} ms, measured {impatient.exposed_ms:.0f} ms")
plots.timeline([impatient])

# %% [markdown]
# A loss. The messages lie inside backward, but so do the waits (white, hatched): `all_reduce` comes back when the sum
# is there, and backward stands still meanwhile, once for each parameter. *When* a message is sent is not enough.

# %% [markdown]
# ## Launch now, wait later
#
# `all_reduce(..., async_op=True)` comes back at once, with a *handle*. The bytes travel on threads of the backend, or
# on a stream of the GPU's own, and `handle.wait()` waits for them. Your `Bucket` has both halves: `launch()` and
# `wait()`. So: hooks fill buckets, a full bucket is launched, and only after backward somebody waits.


# %%
# %%ranks
class HookedDDP(BucketedDDP):
    """BucketedDDP, but a bucket leaves when its last gradient is there."""

    def __init__(self, module, bucket_cap_mb=2.0):
        super().__init__(module, bucket_cap_mb)
        self.sends = True
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
            for place, parameter in enumerate(bucket.parameters):
                arrived = partial(self.arrived, bucket, place)
                parameter.register_post_accumulate_grad_hook(arrived)

    def arrived(self, bucket, place, parameter):
        if self.sends:
            bucket.pack(place)
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.launch()

    def finish_gradient_sync(self):
        for bucket in self.buckets if self.sends else []:
            bucket.wait()
            bucket.missing = len(bucket.parameters)


# %%
# %%ranks
from shared import wire

hooked = HookedDDP(new_model())
lines = [step(hooked) for _ in range(12)]
with wire.ledger() as log:
    step(hooked)
buckets = [entry for entry in log.entries if entry.op == "all_reduce"]  # not the barrier
print(f"{sum(b.in_backward for b in buckets)} of {len(buckets)} launched during backward")

# %% tags=["nbval-ignore-output"]
lines = [of_rank[1:] for of_rank in ranks.pull("lines")]  # without the first
after = fastest(lines[0])
assert after.overlap > 0.1
print(f"exposed: {before.exposed_ms:.0f} ms before, {after.exposed_ms:.0f} ms after")
plots.timeline([after])

# %% [markdown]
# The same seven buckets, now under backward. And the same gradients as chapter 03's:

# %%
# %%ranks
step(bucketed)
pairs = zip(bucketed.parameters(), hooked.parameters(), strict=True)
print("same gradients:", all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs))

# %% [markdown]
# ## How much stays exposed?
#
# The last bucket cannot be hidden: it is full when backward ends. Nor can a bucket travel before the one before it has
# arrived, since they share the link. Bucket *i* is ready at its time and takes $t_i$:
#
# $$e_i = \max(e_{i-1},\ \text{ready}_i) + t_i$$
# $$\text{exposed} = \max(0,\ e_\text{last} - \text{end of backward})$$
#
# Hold that against the run above: ready times from its own timelines (a bucket is ready when it is on *all* ranks),
# $t_i$ from α, β and N.

# %%
from types import SimpleNamespace


def seen(lines):
    """→ one step as all its ranks saw it; times in seconds since it began"""
    began_s = min(line.began_s for line in lines)
    messages = [[s for s in line.spans if s.lane == "communication"] for line in lines]
    backward = [s.ended_s for line in lines for s in line.spans if s.lane == "backward"]
    buckets = list(zip(*messages, strict=True))
    return SimpleNamespace(
        ready_s=[max(s.began_s for s in bucket) - began_s for bucket in buckets],
        ends_s=[max(s.ended_s for s in bucket) - began_s for bucket in buckets],
        sizes_bytes=[message.payload_bytes for message in messages[0]],
        backward_end_s=max(backward) - began_s,
    )


steps = [seen(of_step) for of_step in zip(*lines, strict=True)]
print([round(size / 1e6, 2) for size in steps[0].sizes_bytes], "MB")


# %%
def predicted_ends_s(ready_s, lasts_s):
    ends_s = [0.0]
    for ready, lasts in zip(ready_s, lasts_s, strict=True):
        ends_s.append(max(ends_s[-1], ready) + lasts)
    return ends_s[1:]


def lasts_s(sizes_bytes, world_size):
    return [formulas.ring_all_reduce_s(size, world_size, alpha_s, beta_s) for size in sizes_bytes]


# %% tags=["nbval-ignore-output"]
def stretched(each):
    """→ from the first bucket's being ready to the last one's end: measured / predicted"""
    ends_s = predicted_ends_s(each.ready_s, lasts_s(each.sizes_bytes, 4))
    return (each.ends_s[-1] - each.ready_s[0]) / (ends_s[-1] - each.ready_s[0])


ratios = sorted(stretched(each) for each in steps)
print("measured / predicted, step by step:", ", ".join(f"{ratio:.2f}" for ratio in ratios))
assert 0.75 < ratios[0] < 1.25

# %% tags=["nbval-ignore-output"]
calm = min(steps, key=lambda each: each.ends_s[-1])  # again the one that was disturbed least
ready_ms, came_ms = [[1e3 * s for s in each] for each in (calm.ready_s, calm.ends_s)]
bucket_ms = [1e3 * s for s in lasts_s(calm.sizes_bytes, 4)]
ends_ms, backward_ms = predicted_ends_s(ready_ms, bucket_ms), 1e3 * calm.backward_end_s
predicted_ms = formulas.exposed_s(ready_ms, bucket_ms, backward_ms)
print(f"exposed: predicted {predicted_ms:.0f} ms, measured {came_ms[-1] - backward_ms:.0f} ms")
scaling_plots.schedule(ready_ms, bucket_ms, ends_ms, backward_ms, came_ms)

# %% [markdown]
# Where a bucket comes later than predicted, it wanted for a core: the threads that send share them with the ranks and
# with whatever else runs. And gloo carries two buckets at a time. What counts is the end of the last. It is the one
# with the *first* parameters, because backward ends with them.
#
# Would a smaller last bucket leave less exposed? Look at the dark bars. While full buckets queue, the link has no rest,
# and it does not matter where the bytes are cut. Only where the link rests until the last bucket is full does its own
# size count.

# %% [markdown]
# ## One order on every rank
#
# `HookedDDP` launches a bucket when it is full. In this GPT all ranks fill them in the same order. That need not be so:
# which layer comes first may depend on the samples. Here are two parameters whose gradients are 1 and 10; rank 0
# uses them in another order than the others, and rank 3 can leave one out.


# %%
# %%ranks
class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1, device=device))
        self.b = nn.Parameter(torch.ones(1, device=device))

    def forward(self, order):
        use = {"a": lambda: 1 * self.a, "b": lambda: 10 * self.b}
        return sum([use[name]() for name in order])


roads, ready = TwoBranches(), []
for name, parameter in roads.named_parameters():
    parameter.register_post_accumulate_grad_hook(lambda _, name=name: ready.append(name))
order = {0: "ab", 3: "b"}.get(rank, "ba")
roads(order).backward()
print(f"used {order}, gradients ready: {ready}")

# %% [markdown]
# Backward goes through them from the end. With a bucket for each, rank 0 sends b's first while the others send a's.
# Both are four bytes long. **Predict** what `HookedDDP` makes of the gradients 1 and 10 (all ranks use both).

# %%
my_prediction = {"a": 0.0, "b": 0.0}

# %%
# %%ranks
roads = HookedDDP(TwoBranches(), bucket_cap_mb=1e-6)
roads("ab" if rank == 0 else "ba").backward()
roads.finish_gradient_sync()
print(f"a {roads.module.a.grad.item():.2f}, b {roads.module.b.grad.item():.2f}")

# %% [markdown]
# Rank 0's b met the others' a: (10 + 1 + 1 + 1) / 4. No error, wrong gradients, and two kinds of replica. Had the sizes
# differed, it would have been a crash or a hang, and the doctor's table. Two rules follow (Li et al., VLDB 2020,
# §3.2.3):
#
# 1. **One order.** A bucket is launched when it is full *and all before it are launched*, on every rank.
# 2. **Every bucket, on every rank.** A gradient that does not come counts as zeros; else rank 3's buckets never fill,
#    and the others wait for ever.
#
# In the lab you write both. torch's DDP keeps them too:

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

ddp = DistributedDataParallel(TwoBranches(), bucket_cap_mb=1e-6, find_unused_parameters=True)
for order in ("ab" if rank == 0 else "ba", "b" if rank == 3 else "ab"):
    ddp.zero_grad()
    ddp(order).backward()
    print(f"a {ddp.module.a.grad.item():.2f}, b {ddp.module.b.grad.item():.2f}")

# %% [markdown]
# 0.75 is right: three ranks had 1, rank 3 none. Our `finish_gradient_sync()` knows what has not come, since backward is
# over. DDP has no such call; it must know *before* backward, and so walks through the whole graph after each forward:
# `find_unused_parameters=True`. More about that below.
#
# What else a hook must be ready for:
#
# | what comes | what would happen | what your wrapper will do |
# |---|---|---|
# | a second `backward()` before the sync | it adds to a bucket that is under way | refuse, and say what to do |
# | `grad` is None, as `zero_grad()` leaves it | the gradient comes in a tensor of its own | bring it home |
# | a tied parameter | two gradients, one parameter | nothing: the hook is called once, when both are added |
# | `backward(create_graph=True)` | a gradient with a history, and a message that has none | refuse, and say why |

# %% [markdown]
# ## Messages for the last micro-batch only
#
# Accumulation adds up the gradients of several micro-batches (chapter 02), and only the sum must travel. torch's DDP
# sends in every backward, unless told not to.
#
# **Predict.** Four micro-batches, the first three inside `no_sync()`: how many times the bytes of one backward?

# %%
my_prediction = 0


# %%
# %%ranks
def accumulate(model, quiet):
    """Four micro-batches, those numbered in quiet inside no_sync(). → bytes sent / bytes of the gradients"""
    with wire.ledger() as log:
        for number in range(4):
            with model.no_sync() if number in quiet else contextlib.nullcontext():
                model(*sample).backward()
    return log.payload_bytes / sum(p.nbytes for p in model.parameters())


ddp = DistributedDataParallel(new_model(), bucket_cap_mb=2.0, gradient_as_bucket_view=True)
for _ in range(3):
    step(ddp)  # DDP settles its buckets in the first steps
always, once = accumulate(ddp, quiet=[]), accumulate(ddp, quiet=range(3))
print(f"without no_sync() {always:.0f} times, with it {once:.0f}")

# %% [markdown]
# Ours needs only a flag:


# %%
# %%ranks
@contextlib.contextmanager
def no_sync(self):
    self.sends = False
    yield
    self.sends = True


HookedDDP.no_sync = no_sync
hooked = HookedDDP(new_model())
once = accumulate(hooked, quiet=range(3))
hooked.finish_gradient_sync()
print(f"{once:.0f} times the bytes")

# %% [markdown]
# It has a flaw: let a micro-batch raise an error, catch it, and go on. The flag stays down, and from then on every rank
# trains alone, without a word. Yours in the lab will survive that.

# %% [markdown]
# ## What does communication cost?
#
# `no_sync()` is also the right ruler. What messages *take* says little, since they may be hidden. What they *cost* is
# what a step takes longer than the same step without them:
#
# $$\text{exposed} = T_\text{step} - T_\text{step, no\_sync} \qquad
# \text{communication-to-compute ratio} = \text{exposed} / T_\text{step, no\_sync}$$
#
# All kinds of step are taken in turn, each begins on all ranks at once, the clock is read only when a GPU, too, has
# finished, and the fastest round counts: nothing makes a step faster than it is.


# %%
# %%ranks
from itertools import pairwise


def now_ms():
    if device.type == "cuda":
        torch.cuda.synchronize()  # a GPU still works when a call has returned
    return 1e3 * time.perf_counter()


def timed_step(model, sends=True, batch=sample):
    """→ ms of forward, of backward, of what comes after"""
    model.zero_grad()
    with contextlib.nullcontext() if sends else model.no_sync():
        dist.barrier()
        marks = [now_ms()]
        loss = model(*batch)
        marks.append(now_ms())
        loss.backward()
        marks.append(now_ms())
        finish(model)
        marks.append(now_ms())
    return [end - begin for begin, end in pairwise(marks)]


# %%
# %%ranks
kinds = [(hooked, False), (bucketed,), (hooked,), (ddp,)]
rounds = [[timed_step(*kind) for kind in kinds] for _ in range(7)][1:]

# %% tags=["nbval-ignore-output"]
import torch

names = ["no messages", "BucketedDDP", "HookedDDP", "torch's DDP"]
times_ms = torch.tensor(ranks.pull("rounds"))  # [ranks][rounds][kinds][parts]
steps_ms = times_ms.sum(-1).amax(0).amin(0).tolist()  # the slowest rank's, in the fastest round
for name, ms in zip(names[1:], steps_ms[1:], strict=True):
    print(f"{name:12} communication-to-compute ratio {ms / steps_ms[0] - 1:.0%}")
assert steps_ms[0] < steps_ms[1] and steps_ms[2] < steps_ms[1]

# %% tags=["nbval-ignore-output"]
forward_ms = times_ms[:, :, 0, 0].amax(0).amin().item()
computed = {"forward": forward_ms, "backward": steps_ms[0] - forward_ms}
exposed_of = {name: max(0, ms - steps_ms[0]) for name, ms in zip(names, steps_ms, strict=True)}
parts = {name: computed | {"exposed": exposed} for name, exposed in exposed_of.items()}
scaling_plots.step_parts(parts)

# %% [markdown]
# By the clock of the messages all three look alike: each has 129 ms or more on the wire.

# %% [markdown]
# ## The production version
#
# torch's DDP does all this in C++. Train the same GPT with each, and put them side by side.


# %%
# %%ranks
from shared import memory


def trained(model, steps=3):
    """→ loss at the end, ledger of the last step, bytes at the peak of one more"""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        with wire.ledger() as log:
            loss = model(*sample)
            loss.backward()
            finish(model)
        optimizer.step()
    with memory.peak(model, optimizer) as peak:
        optimizer.zero_grad()
        model(*sample).backward()
        finish(model)
    return loss.item(), log, peak.peak_bytes


# %%
# %%ranks
ddp = DistributedDataParallel(new_model(), bucket_cap_mb=2.0, gradient_as_bucket_view=True)
bucketed, hooked = BucketedDDP(new_model(), bucket_cap_mb=2.0), HookedDDP(new_model())
results = [trained(model) for model in (bucketed, hooked, ddp)]

# %% tags=["nbval-ignore-output"]
rows, of_rank_0 = [], ranks.pull("results")[0]
for name, (loss, log, peak_bytes) in zip(names[1:], of_rank_0, strict=True):
    log.assert_volume(payload_bytes=sum(calm.sizes_bytes))
    sent = [f"{log.messages}", f"{log.sent_bytes / 1e6:.1f}"]
    rows.append([name, f"{loss:.4f}", *sent, f"{exposed_of[name]:.0f}", f"{peak_bytes / 1e6:.1f}"])
losses, _, peaks_bytes = zip(*of_rank_0, strict=True)
assert max(losses) - min(losses) < 1e-3 and peaks_bytes[0] > max(peaks_bytes[1:])
note = "Rank 0; exposed as in the profile above."
tables.Table(["", "loss", "messages", "sent, MB", "exposed, ms", "peak, MB"], rows, note)

# %% [markdown]
# The same losses, the same bytes. `BucketedDDP` has the highest peak: when backward ends, all gradients are there
# twice, once as they came and once in the buckets; a hook packs each as it comes. (DDP's messages are fewer: with a
# given cap its first bucket is no smaller, and it closes one only at or over the cap: chapter 03.) So what else does
# DDP do? Three things, each in the ledger. (Chapter 05 has a fourth.)
#
# **`static_graph=True`.** With `find_unused_parameters=True` DDP walks through the graph after each forward, and sends
# a map of what was used. Promise that the graph never changes, and it asks in the first step only:


# %%
# %%ranks
def fourth_step(**options):
    ddp = DistributedDataParallel(TwoBranches(), **options)
    for _ in range(4):
        with wire.ledger() as log:
            ddp("b").backward()  # a is never used
    return [f"{entry.op} of {entry.elements} {entry.dtype}" for entry in log.entries]


print("find_unused_parameters:", fourth_step(find_unused_parameters=True))
print("static_graph:", fourth_step(static_graph=True))

# %% [markdown]
# **Communication hooks** decide what a bucket sends. This one of torch's sends bfloat16:

# %%
# %%ranks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks


def in_bf16(group, bucket):  # by its own name DDP refuses it where there is no NCCL
    return default_hooks.bf16_compress_hook(group, bucket)


def bytes_of_a_step(hook=None):
    ddp = DistributedDataParallel(new_model())
    if hook:
        ddp.register_comm_hook(None, hook)
    with wire.ledger() as log:
        ddp(*sample).backward()
    return log.payload_bytes


whole, half = bytes_of_a_step(), bytes_of_a_step(in_bf16)
assert half == whole / 2
print(f"{whole / 1e6:.2f} MB, with the hook {half / 1e6:.2f} MB")

# %% [markdown]
# **`broadcast_buffers`**, on by default: rank 0's buffers, such as BatchNorm's running means, go to all before each
# forward. Ours sends them once, at the start.

# %%
# %%ranks
normed = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).to(device)
ddp = DistributedDataParallel(normed)
with wire.ledger() as log:
    ddp(torch.ones(2, 8, device=device))
print([f"{entry.op} of {entry.elements} {entry.dtype}" for entry in log.entries])

# %% [markdown]
# How fast is ours? `python -m benchmarks.ladder` times all rungs in turn, in one run. On 2 cores of a virtual AMD EPYC
# machine (torch 2.13 on CPU, gloo, nothing else running), step time as a multiple of torch's DDP with
# `gradient_as_bucket_view=True`, medians of 16 rounds' own ratios:
#
# | | TinyGPT, 10.7 M | | 200 small parameters | |
# |---|---|---|---|---|
# | **link, ranks** | **2** | **4** | **2** | **4** |
# | `ManualDDP`, loopback | 1.52 | 1.94 | 12.43 | 40.75 |
# | `BucketedDDP`, loopback | 1.12 | 1.13 | 1.03 | 1.01 |
# | `OverlappedDDP`, loopback | 1.05 | 1.05 | 1.12 | 1.05 |
# | `ManualDDP`, 1 Gbit/s | 1.23 | 1.34 | 10.82 | 35.72 |
# | `BucketedDDP`, 1 Gbit/s | 1.12 | 1.09 | 1.04 | 1.05 |
# | `OverlappedDDP`, 1 Gbit/s | 1.03 | 1.02 | 0.97 | 0.99 |
#
# Behind the link, what `OverlappedDDP` has on top comes of its first bucket: closed *before* the cap, it holds 3 KB of
# this GPT, and DDP's, closed after, 2.4 MB that travel while the second fills. With a first cap of 2.5 MB, in a
# run of its own, 1.00 and 1.02 fell to 0.98 and 1.00. Over loopback, what is left is hardly above the noise: repeated
# runs gave 0.99 to 1.05 on TinyGPT, and its CPU time was no more than DDP's. (`ManualDDP` also pays for the course's
# own ear on each message, about 30 µs.)
#
# And where ours differs: you call `finish_gradient_sync()`. It costs a line in the training loop, and saves the walk
# through the graph. The rest is the design of Li et al., *PyTorch Distributed: Experiences on Accelerating Data
# Parallel Training*, VLDB 2020 (arXiv 2006.15704), §3.2.3 and §4.

# %% [markdown]
# ## A bug that gloo hides
#
# The collectives of this lesson ran on the CPU, where gloo's own threads write the results into your tensors. NCCL's
# collectives run on the GPU, on a stream of their own. There, `launch()` only queues the collective, and `wait()` lets
# your program continue: it only makes the GPU's *current stream* wait, so that later operations on the GPU start when
# the collective is complete. Without `wait()`, nothing puts the two streams in order.
#
# In this cell, the call to `wait()` is missing. The pause stands for the rest of backward.

# %%
ranks.start(world_size=2, backend="gloo:cpu", detect_mismatch=False)

# %%
# %%ranks
import time

gradient = torch.full((4,), float(rank))
dist.all_reduce(gradient, async_op=True)
time.sleep(1)
print(gradient / world_size)

# %% [markdown]
# The average of 0 and 1 is 0.5, so the result is right. By the time the cell divides, gloo has finished, and a test
# on gloo passes. On a GPU, the division may run before the all-reduce, and the optimizer would then take a step with
# wrong gradients. No error tells you.
#
# You can find such bugs without a GPU. With `simulate="nccl"`, gloo treats your program as NCCL would: until you have
# called `wait()`, the output holds NaN, and it is an error to use it. Here is the same cell again:

# %%
ranks.start(world_size=2, backend="gloo:cpu", simulate="nccl", detect_mismatch=False)

# %% tags=["raises-exception"]
# %%ranks
import time

gradient = torch.full((4,), float(rank))
dist.all_reduce(gradient, async_op=True)
time.sleep(1)
print(gradient / world_size)

# %% [markdown]
# The message names the collective, the ranks and the line. The simulation also reports a tensor that you change or free
# while a collective still uses it. It cannot tell you how long anything takes on a GPU. Run your labs with it before
# you take your code to GPUs.

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32, S = 4Ψ bytes of gradients, N ranks.
#
# | | memory per rank | sent per rank and step | messages | overlap |
# |---|---|---|---|---|
# | `ManualDDP` | 16Ψ | 2(N−1)/N · S | one per parameter | none |
# | `BucketedDDP` | 16Ψ, + 4Ψ from backward to the sending | 2(N−1)/N · S | one per bucket | none |
# | a hook that waits | 16Ψ | 2(N−1)/N · S | one per parameter | none |
# | `OverlappedDDP`, torch's DDP¹ | 16Ψ | 2(N−1)/N · S | one per bucket | all but max(0, e_last − end of backward) |
#
# ¹ with `gradient_as_bucket_view=True`; else 4Ψ more.

# %% [markdown]
# ## What is still wasted
#
# Communication is now hidden where it can be, and an all-reduce could not send fewer bytes. But each step on four ranks
# still takes longer than a step without communication. How much longer will it be on 8, 64 or 512 ranks? Chapter 05
# measures it on the ranks that you have, and computes it for those that you don't have.
#
# But first build it: in the lab, `OverlappedDDP` gets hooks, a queue, and all that this page left out.

# %%
ranks.stop()
