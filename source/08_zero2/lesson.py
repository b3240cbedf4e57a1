# ---
# jupyter:
#   course:
#     module: zero2
# ---

# %% [markdown]
# # 08 · ZeRO-2
#
# **55–85 minutes.** After this lesson, you will be able to:
#
# - reduce-scatter each bucket of gradients during backward, and free it before launching the next one,
# - state how many bytes of gradients a rank holds at most during backward, on gloo and on NCCL, and name the wait that
#   enforces this bound,
# - say when this lowers the peak memory of a step, and when it does not,
# - predict what a step sends, with one micro-batch and with several,
# - explain how torch's FSDP2 and DeepSpeed's stage 2 differ from your version.
#
# You need `launch_reduce_scatter` (lab 01), buckets and hooks (chapters 03 and 04), activation checkpointing (chapter
# 06), and the `ZeRO1` and `FlatParameter` of chapter 07. As before, Ψ is the number of parameters, N is the number of
# ranks, and f = (N−1)/N.

# %% [markdown]
# ## Where we are
#
# In chapter 07, you built `ZeRO1`. It reduce-scatters the gradients, updates its shard of the parameters, and
# all-gathers the others. For that, a rank needs only the gradients of its own shard.
#
# How much is the rest? With ZeRO-1 in mixed precision, chapter 07's 7.5B model takes 31.4 GB on each of 64 GPUs. Of
# these, 15 GB are bf16 gradients, and a rank's own shard of them is 0.2 GB. Freeing the rest sounds like one line of
# code. In this lesson, we try it three times, and two of the attempts disappoint.
#
# Each rank gets a link of 1 Gbit/s, as in chapter 03:

# %% tags=["nbval-ignore-output"]
from shared import formulas, measure, plots, ranks, tables
from shared.plots import diagrams
from shared.plots import zero as zero_plots
from shared.predictions import predicted

measure.start_behind_link(world_size=4, rate="1gbit", latency_ms=0.1)

# %% [markdown]
# ## What is wasted
#
# What does a rank hold just before the optimizer's step? We train a GPT with `ZeRO1` for two steps and measure in the
# second, because AdamW allocates its state in the first.

# %%
# %%ranks
from functools import partial
from itertools import pairwise

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.zero1 import ZeRO1

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=128)
sample = text.windows(range(rank, 200, 100), length=16)
AdamW, settings = torch.optim.AdamW, {"lr": 1e-3}
model = TinyGPT(config)
zero1 = ZeRO1(model.parameters(), AdamW, **settings)
for _ in range(2):
    zero1.zero_grad()
    model(*sample).backward()
    zero1.reduce_gradients()
    held = memory.held(model, zero1)
    zero1.step()

# %% [markdown]
# To update its shard of the parameters, a rank needs only its shard of the gradients. In the figure, compare the
# gradients that it holds with those that it needs:

# %%
held = ranks.pull("held")[0].by_component()
parameters = held["parameters"] // 4  # each has 4 bytes
assert held["gradients"] == 4 * parameters
needed = held | {"gradients": held["gradients"] // 4}
print(f"Ψ = {parameters:,}")
plots.memory_by_component({"held": held, "needed": needed}, decimals=2)

# %% [markdown]
# Three quarters of the gradients belong to shards that other ranks own. This rank has to *compute* them, because its
# samples contribute to them. But it does not have to *keep* them. In **ZeRO-2**, the second stage of ZeRO, a rank keeps
# only its shard of the gradients and of the optimizer state.

# %% [markdown]
# ## Each bucket has its own shards
#
# We want to free gradients early, so we reduce-scatter them in buckets (chapter 03). The parameters of each bucket get
# their own `FlatParameter`, which keeps them in a flat tensor of N equal shards. So rank r owns the r-th shard of
# *every bucket*. The diagram shows an example of the memory that rank 1 uses for gradients. As in the lab, a bucket
# gets its memory with its first gradient; receive buffers are not drawn. When are three of a bucket's four shards
# freed, and which shard does rank 1 keep?

# %%
diagrams.bucket_owners()

# %% [markdown]
# Why not let rank r own the r-th quarter of the *model*, as `ZeRO1` does without `module=`? Backward fills the buckets
# from the end of the model, so rank 3 would own the first ones completely. With lab 01's direct sends, every other rank
# would send it whole buckets instead of quarters: N times as many bytes on one link, while nothing arrives on the
# others.

# %% [markdown]
# ## First attempt: reducing after backward
#
# The next class packs the gradients of a bucket into a flat tensor, and reduce-scatters them with lab 01's
# `launch_reduce_scatter`, which returns a handle at once. The handle's `wait()` returns this rank's shard of the sum.


# %%
# %%ranks
from solutions.async_collectives import launch_reduce_scatter
from solutions.flat import FlatParameter


class Bucket:
    """A flat parameter, whose gradients are reduce-scattered together and then freed."""

    def __init__(self, parameters, reduce_scatter):
        self.flat_parameter, self.parameters = FlatParameter(parameters), parameters
        self.reduce_scatter, self.in_flight = reduce_scatter, None

    def launch(self):
        layout = self.flat_parameter.layout
        flat = layout.new_flat()
        for parameter, view in zip(self.parameters, layout.views(flat), strict=True):
            view.copy_(parameter.grad)
            parameter.grad = None
        self.in_flight = self.reduce_scatter(flat)

    def wait(self):
        if self.in_flight is not None:
            mean, shard = self.in_flight.wait() / world_size, self.flat_parameter.shard
            shard.grad = mean if shard.grad is None else shard.grad + mean
            self.in_flight = None  # frees the flat tensor


# %% [markdown]
# The simplest version of ZeRO-2 reduces the buckets one by one after backward. The inner AdamW updates this rank's
# shards:


# %%
# %%ranks
from solutions.bucketed_ddp import assign_buckets


class ReduceAfterBackward:
    """ZeRO-2, first attempt: the buckets are reduced and freed when backward is over."""

    def __init__(self, model, reduce_scatter=launch_reduce_scatter, cap_mb=0.25, **settings):
        assigned = assign_buckets(model.parameters(), cap_mb)
        self.buckets = [Bucket(parameters, reduce_scatter) for parameters in assigned]
        self.inner = AdamW([bucket.flat_parameter.shard for bucket in self.buckets], **settings)

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            bucket.launch()
            bucket.wait()

    def step(self):
        self.inner.step()
        self.inner.zero_grad()
        for bucket in self.buckets:
            bucket.flat_parameter.launch_all_gather().wait()


# %% [markdown]
# **Predict.** Between backward and the optimizer's step, a rank now holds a quarter of the gradients. What is the
# largest fraction of the gradients that it holds at *any* moment of a step? 1 means all of them.

# %%
my_prediction = None


# %%
# %%ranks
def one_step(model, optimizer, sample=sample):
    loss = model(*sample)
    loss.backward()
    optimizer.finish_gradient_sync()
    optimizer.step()
    return loss.item()


def begun(kind, **options):
    """Return a new model and its optimizer after one step, so that AdamW has its state."""
    model = TinyGPT(config)
    optimizer = kind(model, **settings, **options)
    one_step(model, optimizer)
    return model, optimizer


def peak_of(model, optimizer, sample=sample):
    """Run one step. Returns the memory over this step."""
    with memory.peak(model, optimizer) as peak:
        one_step(model, optimizer, sample)
    return peak


after = peak_of(*begun(ReduceAfterBackward))

# %%
after = ranks.pull("after")[0]
kept = next(sample.held for sample in after.samples if sample.phase == "step")
most = max(sample.held.gradients_bytes for sample in after.samples) / (4 * parameters)
print(f"held for the optimizer's step: {kept.gradients_bytes / (4 * parameters):.2f}")
print(f"most at any moment: {predicted(my_prediction)}measured {most:.2f}")
assert most >= 1 and after.held.gradients_bytes > 0.9 * 4 * parameters
plots.memory_over_step(after.samples)

# %% [markdown]
# When the last gradient has been computed, a rank holds all of them, because none has been freed yet. In the figure,
# this is the **peak** of the step, the moment at which the rank needs the most memory. A GPU must have room for the
# peak, so what `finish_gradient_sync()` frees afterwards does not help.

# %% [markdown]
# ## Reducing during backward
#
# A bucket can be launched as soon as it is full. Chapter 04 showed how: a hook counts the gradients that are ready. The
# new part is the memory bound: before launching a bucket, wait for the previous one and free it.


# %%
# %%ranks
class ReduceDuringBackward(ReduceAfterBackward):
    """Launches a bucket as soon as it is full, but first waits for the bucket before it."""

    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.enabled = True
        self.previous = {later: earlier for earlier, later in pairwise(self.buckets)}
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self.on_gradient, bucket))

    def on_gradient(self, bucket, _):
        if self.enabled:
            bucket.missing -= 1
        if bucket.missing == 0:
            if bucket in self.previous:
                self.previous[bucket].wait()
            bucket.launch()
            bucket.missing = len(bucket.parameters)

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            bucket.wait()


# %% [markdown]
# All ranks fill the buckets of this GPT in the same order. In general, you need lab 04's queue.
#
# How many bytes of gradients can a rank hold at any one moment? Its shards of the buckets that have been reduced take
# at most 4Ψ/N bytes. In addition, there are:
#
# | what | on gloo | with NCCL |
# |---|---|---|
# | the flat tensor of the bucket in flight | 1 bucket | 1 bucket |
# | the buffer into which the reduce-scatter receives ¹ | f buckets | 1/N of a bucket, or nothing |
# | gradients that wait until the next bucket is full | up to 1 bucket | up to 1 bucket |
#
# ¹ A collective writes the data that it receives to its **receive buffer**. On gloo, `launch_reduce_scatter` receives a
# shard from each of the other ranks, and then adds them up. NCCL adds while it transfers, so it needs only an output as
# large as one shard, which may even be a part of the flat tensor.
#
# Either way, the bound is 4Ψ/N plus three buckets. In the figure, compare the dashed line (`ReduceDuringBackward`) with
# this level:


# %%
# %%ranks
def gradient_bytes(peak):
    """Return the bytes of gradients and buckets at every moment of backward."""
    held = [sample.held for sample in peak.samples if sample.phase == "backward"]
    return [each.gradients_bytes + each.buckets_bytes for each in held]


def curve_of(kind):
    """Take the least of three steps at each moment, because gloo's threads may free a tensor late."""
    model, optimizer = begun(kind)
    steps = [gradient_bytes(peak_of(model, optimizer)) for _ in range(3)]
    return [min(moment) for moment in zip(*steps, strict=True)]


curves = {"after": curve_of(ReduceAfterBackward), "during": curve_of(ReduceDuringBackward)}
buckets = ReduceAfterBackward(TinyGPT(config)).buckets
bucket_bytes = max(bucket.flat_parameter.flat_param.nbytes for bucket in buckets)

# %%
bound_bytes = 4 * parameters / 4 + 3 * ranks.pull("bucket_bytes")[0]
for curves in ranks.pull("curves"):
    assert max(curves["during"]) <= bound_bytes
    assert max(curves["after"]) >= 4 * parameters
levels = {"4Ψ": 4 * parameters, "4Ψ/N": parameters, "4Ψ/N + 3 buckets": bound_bytes}
zero_plots.over_backward(ranks.pull("curves")[0], levels)

# %% [markdown]
# When a bucket is freed, the dashed line falls. Smaller buckets would keep it closer to 4Ψ/N, but cost more latency
# (chapter 03).

# %% [markdown]
# ## The wait that enforces the bound
#
# `OverlappedDDP` launches each bucket when it is full, and waits for all of them at the end. Let's try the same with
# reduce-scatters.

# %% [markdown]
# **Predict.** Suppose that backward never waits. How many bytes of gradients and buckets does a rank hold at the peak,
# as a multiple of 4Ψ? 1 means as many as without sharding.

# %%
my_prediction = None


# %%
# %%ranks
class NeverWaits(ReduceDuringBackward):
    def __init__(self, model, **options):
        super().__init__(model, **options)
        self.previous = {}


most_bytes = max(curve_of(NeverWaits))

# %%
times = ranks.pull("most_bytes")[0] / (4 * parameters)
print(f"{predicted(my_prediction)}measured {times:.2f} times 4Ψ")
assert times > 1.6

# %% [markdown]
# That is worse than without sharding. Every flat tensor and every receive buffer stays alive until the rank has waited
# for its reduce-scatter, so together they take about 1 + f = 1.75 times 4Ψ. For `OverlappedDDP`, not waiting costs no
# memory, because its buckets *are* its gradients.

# %% [markdown]
# ## When do gradients determine the peak?
#
# Above, the peak was at the end of backward. We arranged that, with samples of only 16 tokens. While backward runs,
# gradients pile up and activations are freed. With longer samples, which of the two decides the peak?

# %% [markdown]
# **Predict.** With samples of 64 tokens, how high is the peak with `ReduceDuringBackward`, as a fraction of the peak
# with `ReduceAfterBackward`? 1 means that they are equal. And what is the fraction if every block is checkpointed, as
# in chapter 06?

# %%
my_prediction, my_prediction_checkpointed = None, None

# %%
# %%ranks
from torch.utils.checkpoint import checkpoint

longer = text.windows(range(rank, 200, 100), length=64)
begun_kinds = {
    "after backward": begun(ReduceAfterBackward),
    "during backward": begun(ReduceDuringBackward),
}
held = {name: peak_of(*pair, longer).held.by_component() for name, pair in begun_kinds.items()}
for name, (model, optimizer) in begun_kinds.items():
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    held[f"{name}, checkpointed"] = peak_of(model, optimizer, longer).held.by_component()

# %%
held = ranks.pull("held")[0]
after, during, after_checkpointed, checkpointed = (sum(parts.values()) for parts in held.values())
print(f"plain: {predicted(my_prediction)}measured {during / after:.2f}")
fraction = checkpointed / after_checkpointed
print(f"checkpointed: {predicted(my_prediction_checkpointed)}measured {fraction:.2f}")
assert abs(during / after - 1) < 0.1 and fraction < 0.9
plots.memory_by_component(held)

# %% [markdown]
# Without checkpointing, activations determine the peak. They are highest when backward *begins*, when there are hardly
# any gradients, so it matters little when those are reduced. With checkpointing, gradients determine the peak, and
# reducing them during backward takes a fifth off it.

# %% [markdown]
# ## The short version
#
# `ReduceDuringBackward` and the two classes that it builds on are all you need to train. The next cell trains the
# digits MLP twice from the same weights: in one process on the full batch, and with ZeRO-2, where each rank has a
# quarter of each batch. One of the two buckets needs padding.


# %%
# %%ranks --timeout 120
from shared.data import digits
from shared.models import MLP

images, labels = digits(torch.float64)


class Plain:
    """AdamW without sharding, with the methods that one_step calls."""

    def __init__(self, model, **settings):
        self.inner = AdamW(model.parameters(), **settings)

    def finish_gradient_sync(self):
        pass

    def step(self):
        self.inner.step()
        self.inner.zero_grad()


def train(share, kind, **options):
    """Train on a share of each batch. Returns the losses."""
    mlp, losses = MLP().double(), []
    optimizer = kind(mlp, lr=3e-3, **options)
    for step in range(150):
        batch = torch.randperm(1500, generator=torch.Generator().manual_seed(step))[:128][share]
        loss = torch.nn.functional.cross_entropy(mlp(images[batch]), labels[batch])
        loss.backward()
        optimizer.finish_gradient_sync()
        optimizer.step()
        losses.append(loss.item())
    return losses


alone = train(slice(None), Plain)
together = train(slice(rank, None, world_size), ReduceDuringBackward, cap_mb=0.15)

# %% tags=["nbval-ignore-output"]
alone = ranks.pull("alone")[0]
together = [sum(of_step) / 4 for of_step in zip(*ranks.pull("together"), strict=True)]
difference = max(abs(x - y) for x, y in zip(alone, together, strict=True))
print(f"largest difference of the losses: {difference:.0e}")
assert difference < 1e-6 and max(alone[-10:]) < 0.5 * alone[0]

# %% [markdown]
# How much memory does ZeRO-2 save? Between backward and the optimizer's step, the 16 bytes per parameter of data
# parallelism become 4 + 12/N bytes in fp32, and 2 + 14/N in mixed precision (chapter 06):

# %%
kept_bytes = kept.parameters_bytes + kept.gradients_bytes + kept.optimizer_bytes
formula_bytes = formulas.model_state_bytes(parameters, 4, 2, formulas.FP32_ADAM)
assert 0 <= kept_bytes - formula_bytes < 1000  # AdamW's step counters
print(f"fp32, 4 ranks: {kept_bytes / parameters:.2f} bytes per parameter")
savings = [f"{formulas.memory_saving(n, stage=2):.2f}" for n in (2, 4, 8, 64, 10**9)]
tables.Table(["ranks", "2", "4", "8", "64", "→ ∞"], [["mixed precision: factor", *savings]])

# %% [markdown]
# The 7.5B model of the beginning takes 120 GB on one GPU, and 120 / 7.21 = 16.6 GB on each of 64, instead of ZeRO-1's
# 31.4 GB. The "8x" of the ZeRO paper (§1) is the limit on very many ranks, without activations and buckets.

# %% [markdown]
# ## What a step sends
#
# Data parallelism sends 2fΨ elements per step (chapter 03). What does ZeRO-2 send?

# %% [markdown]
# **Predict.** How many bytes does our ZeRO-2 send, as a multiple of what data parallelism sends? And how many if a
# bucket is *all-reduced*, and each rank then keeps its slice, as DeepSpeed does by default? 1 means equally many.

# %%
my_prediction, my_prediction_slice = None, None


# %%
# %%ranks
class AllReduceThenSlice:
    """An all-reduce in flight. wait() returns this rank's shard of the sum."""

    def __init__(self, flat):
        self.flat, self.handle = flat, dist.all_reduce(flat, async_op=True)

    def wait(self):
        self.handle.wait()
        return self.flat.chunk(world_size)[rank]


def ledger_of(model, optimizer):
    with wire.ledger() as log:
        one_step(model, optimizer)
    return log


log = ledger_of(*begun(ReduceDuringBackward))
sliced = ledger_of(*begun(ReduceDuringBackward, reduce_scatter=AllReduceThenSlice))

# %%
log, sliced = ranks.pull("log")[0], ranks.pull("sliced")[0]
log.assert_volume(sent_bytes=formulas.step_sent_bytes(parameters, ranks=4, stage=2, bytes_each=4))
ddp_bytes = formulas.step_sent_bytes(parameters, ranks=4, stage=0, bytes_each=4)
times, times_sliced = log.sent_bytes / ddp_bytes, sliced.sent_bytes / ddp_bytes
print(f"reduce-scatter: {predicted(my_prediction)}measured {times:.2f} times")
print(f"all-reduce, slice: {predicted(my_prediction_slice)}measured {times_sliced:.2f} times")
assert times == 1 and times_sliced == 1.5

# %% [markdown]
# ZeRO-2 sends exactly as much as data parallelism: f · 4Ψ bytes for the reduce-scatters and f · 4Ψ for the all-gathers
# (Rajbhandari et al. 2020, "ZeRO", §7). As in ZeRO-1, these are the two halves of an all-reduce, with the optimizer's
# step between them. If you all-reduce and slice, you have the memory of ZeRO-2, but send 1.5 times as many bytes.

# %% [markdown]
# ## Is communication still hidden?
#
# DDP hides its all-reduces behind backward. We record a step of DDP and of both versions of ZeRO-2. As in chapter 04,
# each block sleeps, as a stand-in for a GPU. With a cap of 0.8 MB, a bucket holds about one block.


# %%
# %%ranks --timeout 120
from torch.nn.parallel import DistributedDataParallel

from shared import measure, timeline
from shared.models import stand_in_for_gpu
from shared.timeline.bundles import bundled


def recorded(model, optimizer, operations, **named):
    """Record seven steps. Returns the one of median length as this rank saw it, one span per collective."""
    stand_in_for_gpu(getattr(model, "module", model).blocks, forward_ms=6, backward_ms=12)
    step = {"": partial(one_step, model, optimizer)}
    lines = measure.recorded(step, lambda: timeline.record(model, optimizer.inner), rounds=7)[""]
    return bundled(lines[rank], operations, **named)


def in_ddp():
    ddp = DistributedDataParallel(TinyGPT(config), bucket_cap_mb=0.8, gradient_as_bucket_view=True)
    return ddp, Plain(ddp, **settings)


lines = {"DDP": recorded(*in_ddp(), operations=1)}
buckets = [str(number) for number in range(1, 8)]
named = {"names": 2 * buckets, "lanes": 7 * ["reduce-scatter"] + 7 * ["all-gather"]}
for kind in (ReduceAfterBackward, ReduceDuringBackward):
    # A reduce-scatter or all-gather over gloo consists of 3 sends and 3 receives.
    lines[kind.__name__] = recorded(*begun(kind, cap_mb=0.8), operations=6, **named)

# %% [markdown]
# In the upper timeline, "communication" means DDP's all-reduces. In the lower two, the numbers are those of the
# buckets. A bar ends when the rank has waited for the collective, even if the data arrived earlier. All three are
# steps of rank 0. Compare where the reduce-scatters are, and how long the rank waits (hatched):

# %% tags=["nbval-ignore-output"]
lines = ranks.pull("lines")[0]
after, during = lines["ReduceAfterBackward"], lines["ReduceDuringBackward"]
measure.expect(during.exposed_ms < after.exposed_ms, "less is exposed during backward")
for line in (after, during):
    assert [len(line.lane(kind)) for kind in ("reduce-scatter", "all-gather")] == [7, 7]
plots.timeline(list(lines.values()), list(lines), hidden=False)

# %% [markdown]
# With `ReduceDuringBackward`, the reduce-scatters are in flight during backward, as DDP's all-reduces are. Most of what
# stays exposed is all-gathers: they follow the optimizer's step, when nothing is left to compute. DDP hides both halves
# of its all-reduces, and this version of ZeRO-2 only one. The other half can be hidden behind the next forward (chapter
# 07), and the lab's `ZeRO2` does that.
#
# Why are the bars so long? All bytes of a step need only 58 ms of this link, half of them for reduce-scatters. But four
# processes share one machine's cores, and for each bucket, they have to wake up, pack and add up. That lengthens
# backward, too. On a GPU, packing takes microseconds. DDP has fewer buckets, because it closes a bucket once it has
# reached the cap, and we close ours before.
#
# Does the new wait cost time? Not if each bucket is reduced before the next one is full, and not if the link is busy
# throughout. But suppose that four buckets take 2, 2, 10 and 10 ms to compute and 6 ms each to send. Without the wait,
# the last one arrives after 30 ms. With it, backward stands still from 4 to 8 ms, and the last bucket arrives after 34
# ms. So the wait costs time if buckets that fill quickly are followed by buckets that fill slowly.

# %% [markdown]
# ## Several micro-batches
#
# In chapter 04, `no_sync()` let gradients accumulate, and they were reduced only with the last micro-batch. Until then,
# every rank accumulates *full* gradients: the very memory that ZeRO-2 has just saved. With `enabled = False`,
# `ReduceDuringBackward` does that, too. To keep the memory low, we can instead reduce the gradients of every
# micro-batch, so that only this rank's shards accumulate. What does that cost?

# %% [markdown]
# **Predict.** You accumulate four micro-batches, and reduce the gradients of each one. How many times f · 4Ψ bytes does
# a step send? For one micro-batch, the answer is 2.

# %%
my_prediction = None


# %%
# %%ranks
def accumulated(model, optimizer, micro_batches, last_only):
    """Run a step. Returns the bytes sent, and those of gradients and buckets at every moment of backward."""
    with wire.ledger() as log, memory.peak(model, optimizer) as peak:
        for index in range(micro_batches):
            optimizer.enabled = not last_only or index == micro_batches - 1
            (model(*sample) / micro_batches).backward()
            optimizer.finish_gradient_sync()
        optimizer.step()
    return log.sent_bytes, gradient_bytes(peak)


results = []
for kind in ((1, False), (2, False), (4, False), (4, True)):
    model, optimizer = begun(ReduceDuringBackward)
    sent_bytes, curves = zip(*(accumulated(model, optimizer, *kind) for _ in range(3)), strict=True)
    most_bytes = max(min(moment) for moment in zip(*curves, strict=True))  # as in curve_of
    results.append((*kind, max(sent_bytes), most_bytes))

# %% tags=["nbval-ignore-output"]
rows = []
for g, last_only, sent_bytes, most_bytes in ranks.pull("results")[0]:
    stage, name = (1, "the last one") if last_only else (2, "each one")
    assert sent_bytes == formulas.step_sent_bytes(parameters, 4, stage, 4, micro_batches=g)
    assert (most_bytes > 4 * parameters) == last_only
    sent = sent_bytes / (ddp_bytes / 2)
    rows.append([f"{g}", name, f"{sent:g}", f"{most_bytes / (4 * parameters):.2f}"])
print(f"{predicted(my_prediction)}measured {rows[2][2]}")
header = ["micro-batches", "reduced", "sent, in f · 4Ψ", "gradients and buckets at the peak, in 4Ψ"]
tables.Table(header, rows)

# %% [markdown]
# With g micro-batches, a step sends (g + 1) times f · 4Ψ bytes: one reduce-scatter per micro-batch, and one all-gather
# after the optimizer's step. So if g > 1, ZeRO-2 sends more than data parallelism. If only the last micro-batch is
# reduced, a step sends 2 times f · 4Ψ bytes, but each rank needs room for full gradients, plus the buckets. If you have
# that room, use ZeRO-1. It is simpler and sends the same bytes, and with `module=` it launches its reduce-scatters
# during backward, too.
#
# Pipeline parallelism needs many micro-batches, so it usually comes with ZeRO-1 (chapter 15). DeepSpeed's pipeline
# engine even rejects stages 2 and 3 (`deepspeed/runtime/pipe/engine.py`).

# %% [markdown]
# ## The production version
#
# **FSDP2** is torch's `fully_shard`, which shards parameters, gradients and optimizer state. With
# `reshard_after_forward=False`, it keeps all parameters from forward until backward has used them. This is the closest
# thing to ZeRO-2 in torch. We give it a **mesh**, an arrangement of the ranks that also names the type of device. The
# next cell compares it with our version and DDP:

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def in_fsdp2():
    model, mesh = TinyGPT(config), init_device_mesh(device.type, (world_size,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return model, Plain(model, **settings)


kinds = {"DDP": in_ddp(), "ours": begun(ReduceDuringBackward, cap_mb=0.8), "FSDP2": in_fsdp2()}
results = {}
for name, kind in kinds.items():
    for _ in range(3 if name == "ours" else 4):  # ours has begun with one step
        loss = one_step(*kind)
    log, between, peak = ledger_of(*kind), memory.held(*kind), peak_of(*kind)
    results[name] = loss, log.sent_bytes, between.total_bytes, peak.peak_bytes

# %% tags=["nbval-ignore-output"]
results, rows = ranks.pull("results")[0], []
for name, (loss, *sizes) in results.items():
    assert abs(loss - results["DDP"][0]) < 1e-3 and abs(sizes[0] / ddp_bytes - 1) < 0.01
    rows.append([name, f"{loss:.4f}", *(f"{size / 1e6:.2f}" for size in sizes)])
assert results["FSDP2"][2] < results["ours"][2] < results["DDP"][2]
header = ["", "loss, step 4", "must send, MB", "held between steps, MB", "peak, MB"]
tables.Table(header, rows, "Rank 0.")

# %% [markdown]
# The losses and the bytes to send are equal. Ours sends and holds 6Ψ bytes, a coincidence of four ranks. Between steps,
# DDP's buckets still hold the gradients. But FSDP2 is not quite ZeRO-2:
#
# - **Parameters.** Between steps, FSDP2 shards the parameters, too, so it holds less. While it computes, it holds full
#   copies next to its shards, so its peak is higher.
# - **The wait.** FSDP2 also waits for one reduce-scatter before it copies gradients for the next one, and can stall as
#   in our example. In torch 2.13, `set_reduce_scatter_max_input_buffers` removes the stall: it allows more in flight,
#   at the cost of memory.
# - **Names.** FSDP1, torch's older class, calls this mode `SHARD_GRAD_OP`.
#
# DeepSpeed's stage 2 all-reduces and slices. By default, a step sends 3f · 4Ψ bytes instead of 2f · 4Ψ, because
# `use_multi_rank_bucket_allreduce` is on. Set it to false, and DeepSpeed runs one `reduce` per owner, which sends half
# as much as an all-reduce (version 0.19.8, `average_tensor` in `stage_1_and_2.py`). Either way, a rank owns a
# contiguous range of the model, the layout that we rejected above.
#
# Two more things cost time. `overlap_comm` is off by default. And every micro-batch is reduced, because `no_sync()`
# raises an error for stages 2 and 3 (DeepSpeed issue 6793). With `coalesce_grad_reduction()`, DeepSpeed reduces once
# per step, and holds full gradients until then.

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32, AdamW, N ranks, g micro-batches, f = (N−1)/N. "Gradients" includes the buckets.
#
# | | parameters and optimizer | gradients at the peak | sent per rank and step | overlap |
# |---|---|---|---|---|
# | DDP | 4Ψ + 8Ψ | 4Ψ | 2f · 4Ψ | both halves |
# | ZeRO-1 | 4Ψ + 8Ψ/N | 4Ψ¹ | 2f · 4Ψ | both halves, if it knows the module |
# | ZeRO-2 | 4Ψ + 8Ψ/N | 4Ψ/N and 2 + f buckets² | (g + 1)f · 4Ψ | the reduce-scatters; in the lab, both halves |
# | ZeRO-2, only the last micro-batch reduced | 4Ψ + 8Ψ/N | 4Ψ and 2 buckets³ | 2f · 4Ψ | the reduce-scatters |
#
# ¹ On gloo, plus two receive buffers. ² With NCCL, 2 + 1/N buckets. ³ A receive buffer, and the
# gradient that backward is adding.
#
# **Terms**
#
# - **ZeRO-2**: a rank keeps all parameters, but only its shard of the gradients and of the optimizer state.
# - **peak**: the moment of a step at which a rank holds the most memory, and how much that is.
# - **receive buffer**: the memory that a collective fills with what a rank receives.
# - **FSDP2**: torch's `fully_shard`, which shards parameters, gradients and optimizer state.
# - **mesh**: an arrangement of ranks in one or more dimensions, along which a tensor or a model is sharded.

# %% [markdown]
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): what changes with NCCL and many hosts.
# - Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training Trillion Parameter Models*, SC 2020 (arXiv
#   1910.02054): §5.2 on stage 2, and §7 on what each stage sends.
# - Zhao et al., *PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel*, VLDB 2023 (arXiv 2304.11277): §3.4
#   on the rate limiter, which allows at most two all-gathers in flight.
# - `post_backward` in `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`: the wait of this lesson, in torch.

# %% [markdown]
# ## What is still wasted
#
# The optimizer state and the gradients are sharded now. What makes up most of the rest?

# %%
fraction = kept.parameters_bytes / kept_bytes
print(f"parameters are {fraction:.0%} of what is held for the optimizer's step")
assert round(fraction, 2) == round(4 / 7, 2)  # 4Ψ of 4Ψ + 4Ψ/4 + 8Ψ/4

# %% [markdown]
# Every rank holds all parameters all the time. But only one of the six blocks computes at a time, and the parameters of
# the others could stay sharded until it is their turn. That is ZeRO-3 (chapter 09).
#
# But first, you build the wrapper `ZeRO2` in the lab. It also works with unused parameters and with `no_sync()`.

# %%
ranks.stop()
