# ---
# jupyter:
#   course:
#     module: zero2
# ---

# %% [markdown]
# # 08 · ZeRO-2
#
# **35–50 minutes.** After this lesson, you will be able to:
#
# - reduce-scatter each bucket of gradients during backward, and free it before launching the next one,
# - state how many bytes of gradients a rank holds at most during backward, and name the wait that enforces this bound,
# - say when this lowers the peak memory of a step, and when it does not,
# - predict what a step sends, with one micro-batch and with several,
# - explain how torch's FSDP2 and DeepSpeed's stage 2 differ from your version.
#
# You need `launch_reduce_scatter` (lab 01), buckets and hooks (chapters 03 and 04), activation checkpointing (chapter
# 06), and the `FlatParameter` of chapter 07. As before, Ψ is the number of parameters, N is the number of ranks, and f
# = (N−1)/N.

# %% [markdown]
# ## Where we are
#
# ZeRO-1 brought a 7.5B model down to 31.4 GB on each of 64 GPUs (ZeRO paper, figure 1). Of these, 15 GB are fp16
# gradients. How much of that does a rank need to update its shard of the parameters? Only its own shard: 0.2 GB. It has
# to *compute* the others, because its samples contribute to them. It does not have to *keep* them. In **ZeRO-2**, the
# second stage of ZeRO, a rank keeps only its shard of the gradients and of the optimizer state.
#
# Freeing the rest sounds like one line of code. We try it three times, and two attempts disappoint.

# %% tags=["nbval-ignore-output"]
from shared import formulas, plots, ranks, tables
from shared.plots import diagrams
from shared.plots import zero as zero_plots
from shared.predictions import predicted

ranks.start(world_size=4, detect_mismatch=False)

# %%
# %%ranks
from functools import partial

from torch import nn

from shared import measure, memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.async_collectives import launch_reduce_scatter
from solutions.bucketed_ddp import assign_buckets
from solutions.flat import FlatParameter
from solutions.overlapped_ddp import OverlappedDDP

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=128)
sample = text.windows(range(rank, 200, 100), length=16)
AdamW = partial(torch.optim.AdamW, lr=1e-3)

# %% [markdown]
# ## Each bucket has its own shards
#
# To free gradients early, we reduce-scatter them in buckets (chapter 03). So who owns what? The parameters of each
# bucket get their own `FlatParameter`, which keeps them in a flat tensor of N equal shards, and rank r owns the r-th
# shard of *every bucket*. The diagram shows the memory that rank 1 uses for gradients, one stripe per shard. As in the
# lab, a bucket gets its memory with its first gradient. When are three of its four stripes freed, and which one does
# rank 1 keep?

# %%
diagrams.bucket_owners()

# %% [markdown]
# Rank 1 keeps its own stripe. The others of buckets 1 and 2 are freed when the *next* bucket is launched: those of
# bucket 1 at 40 ms, while backward still computes. Our first two attempts miss that moment.
#
# Why not the r-th quarter of the *model*? Backward begins at the model's end, so rank 3 would own the first buckets
# completely. With lab 01's direct sends, the others would send it whole buckets instead of quarters: N times as many
# bytes into rank 3, and none into the others.

# %% [markdown]
# ## First attempt: reducing after backward
#
# The simplest idea: finish backward, then free. The next class packs the gradients of a bucket into a flat tensor, and
# reduce-scatters them with lab 01's `launch_reduce_scatter`, which returns a handle at once. The handle's `wait()`
# returns this rank's shard of the sum.


# %%
# %%ranks
class Bucket:
    """A flat parameter, whose gradients are reduce-scattered together and then freed."""

    def __init__(self, parameters):
        self.flat_parameter, self.parameters = FlatParameter(parameters), parameters
        self.in_flight, self.missing = None, len(parameters)

    def launch(self):
        layout = self.flat_parameter.layout
        flat = layout.new_flat()
        for parameter, view in zip(self.parameters, layout.views(flat), strict=True):
            view.copy_(parameter.grad)
            parameter.grad = None
        self.in_flight = launch_reduce_scatter(flat)

    def wait(self):
        if self.in_flight is not None:
            mean, shard = self.in_flight.wait() / world_size, self.flat_parameter.shard
            shard.grad = mean if shard.grad is None else shard.grad + mean
            self.in_flight = None  # frees the flat tensor


# %% [markdown]
# After backward, we reduce the buckets one by one. The inner AdamW updates this rank's shards:


# %%
# %%ranks
class ReduceAfterBackward(nn.Module):
    """ZeRO-2, first attempt: the buckets are reduced and freed when backward is over."""

    def __init__(self, module):
        super().__init__()
        self.module = module
        self.buckets = [Bucket(each) for each in assign_buckets(module.parameters(), 0.25)]
        self.inner = AdamW([bucket.flat_parameter.shard for bucket in self.buckets])

    def forward(self, *batch):
        return self.module(*batch)

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
# The catch: backward has computed *all* gradients before the first one is freed. So for a moment, a rank holds 4Ψ bytes
# of them, as without sharding, and a GPU must have room for the **peak** of a step, the moment at which it needs the
# most memory. What `finish_gradient_sync()` frees afterwards comes too late.

# %% [markdown]
# ## Second attempt: launching each full bucket
#
# Then let's send earlier. `OverlappedDDP` launches each bucket as soon as it is full, and waits for all of them at the
# end (chapter 04). We do the same with reduce-scatters:


# %%
# %%ranks
class NeverWaits(ReduceAfterBackward):
    """ZeRO-2, second attempt: backward launches each bucket when it is full, and never waits."""

    enabled = True  # False lets gradients accumulate, as in no_sync()

    def __init__(self, module):
        super().__init__(module)
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self.on_gradient, bucket))

    def on_gradient(self, bucket, _parameter):
        if self.enabled:
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.missing = len(bucket.parameters)
                bucket.launch()

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            bucket.wait()


# %% [markdown]
# All ranks fill the buckets of this GPT in the same order. In general, you need lab 04's queue.
#
# **Predict.** How many bytes of gradients and buckets does a rank hold at most during backward, as a multiple of 4Ψ? 1
# means as many as without sharding.

# %%
my_prediction = None


# %%
# %%ranks
def in_backward(peak):
    """Return the bytes of gradients and buckets at every moment of backward."""
    held = [moment.held for moment in peak.samples if moment.phase == "backward"]
    return [each.gradients_bytes + each.buckets_bytes for each in held]


def curve_of(kind):
    zero2 = kind(TinyGPT(config))
    # gloo's threads may free a tensor late, so we take the least of three steps.
    steps = [in_backward(measure.costs(zero2, zero2, *sample).peak) for _ in range(3)]
    return [min(moment) for moment in zip(*steps, strict=True)]


curves = {"after backward": curve_of(ReduceAfterBackward), "never waits": curve_of(NeverWaits)}
full_bytes = sum(parameter.nbytes for parameter in TinyGPT(config).parameters())  # 4Ψ

# %%
full_bytes = ranks.pull("full_bytes")[0]
times = max(ranks.pull("curves")[0]["never waits"]) / full_bytes
print(f"{predicted(my_prediction)}measured {times:.2f} times 4Ψ")
assert times > 1.6

# %% [markdown]
# That is worse than without sharding! Every flat tensor stays alive until the rank has waited for its reduce-scatter,
# and so does its **receive buffer**, the memory into which a collective writes what it receives. Over gloo, that is a
# shard from each of the other ranks, f times the flat tensor. Together, they take about 1 + f = 1.75 times 4Ψ. For
# `OverlappedDDP`, not waiting costs no memory, because its buckets *are* its gradients.

# %% [markdown]
# ## Third attempt: the wait that enforces the bound
#
# Both attempts free their buckets only after backward. The diagram shows a better moment: before launching a bucket,
# wait for the previous one and free it.


# %%
# %%ranks
class ReduceDuringBackward(NeverWaits):
    """ZeRO-2, third attempt: waits for the bucket in flight before it launches the next one."""

    def on_gradient(self, bucket, parameter):
        if bucket.missing == 1:  # this gradient fills the bucket
            for other in self.buckets:
                other.wait()
        super().on_gradient(bucket, parameter)


curves["during backward"] = curve_of(ReduceDuringBackward)
buckets = NeverWaits(TinyGPT(config)).buckets
bucket_bytes = max(bucket.flat_parameter.flat_param.nbytes for bucket in buckets)

# %% [markdown]
# Now a rank holds its shards of the buckets that have been reduced, at most 4Ψ/N bytes, and at most 2 + f buckets: the
# flat tensor of the bucket in flight, its receive buffer of f buckets, and the gradients of the next bucket. NCCL adds
# while it transfers, so it needs at most one shard to receive into. In the figure, a marker shows the highest point of
# each attempt. Compare it with this bound, rounded up to three buckets:

# %%
curves, bucket_bytes = ranks.pull("curves"), ranks.pull("bucket_bytes")[0]
levels = {"4Ψ": full_bytes, "4Ψ/N": full_bytes / 4}
levels["4Ψ/N + 3 buckets"] = full_bytes / 4 + 3 * bucket_bytes
zero_plots.over_backward(curves[0], levels)

# %% tags=["claims"] jupyter={"source_hidden": true}
for of_rank in curves:
    assert max(of_rank["during backward"]) <= levels["4Ψ/N + 3 buckets"]
    assert max(of_rank["after backward"]) >= full_bytes

# %% [markdown]
# The other two lines turn down only in `finish_gradient_sync()`, when backward is over. That is early on the first
# attempt's line, because all its packing and sending is still to come. The third attempt stays below the bound, because
# its line falls with each freed bucket. Smaller buckets would keep it closer to 4Ψ/N, but cost more latency (chapter
# 03).
#
# ## The short version
#
# `ReduceDuringBackward` and the classes that it builds on are a complete ZeRO-2. But does it still train? We compare
# its losses with those of data parallelism:

# %% tags=["nbval-ignore-output"]
# %%ranks
ddp, zero2 = OverlappedDDP(TinyGPT(config)), ReduceDuringBackward(TinyGPT(config))
pairs = (ddp, AdamW(ddp.parameters())), (zero2, zero2)
losses = [[measure.train_step(*pair, *sample) for _ in range(10)] for pair in pairs]
most = max(abs(one - other) for one, other in zip(*losses, strict=True))
if rank == 0:
    print(f"losses: {losses[1][0]:.2f} to {losses[1][-1]:.2f}, largest difference {most:.0e}")

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
from shared import formulas

assert most < 1e-3 and losses[1][-1] < losses[1][0]
moments = measure.costs(zero2, zero2, *sample).peak.samples
kept = next(moment.held for moment in moments if moment.phase == "step")
kept_bytes = kept.parameters_bytes + kept.gradients_bytes + kept.optimizer_bytes
formula_bytes = formulas.model_state_bytes(full_bytes / 4, 4, 2, formulas.FP32_ADAM)
assert 0 <= kept_bytes - formula_bytes < 1000  # AdamW's step counters

# %% tags=["claims"] jupyter={"source_hidden": true}
assert f"{formulas.model_state_bytes(7.5, 64, 2):.1f}" == "16.6"
assert f"{formulas.memory_saving(10**9, stage=2):.2f}" == "8.00"

# %% [markdown]
# The training is the same. Between backward and the optimizer's step, the 16 bytes per parameter of data parallelism
# become 4 + 12/N in fp32, and 2 + 14/N in mixed precision (chapter 06). So the 31.4 GB that we began with become 16.6
# GB. The "8x" of the ZeRO paper (§1) is the limit on very many ranks, without activations and buckets.

# %% [markdown]
# ## What the wait costs
#
# We bought memory with a wait. Does it cost time? Not if each bucket is reduced before the next one is full, and not if
# the link is busy throughout. But suppose that four buckets take 2, 2, 10 and 10 ms to compute and 6 ms each to send.
# When does the last one complete? Without the wait, after 30 ms. With the wait, backward stalls from 4 to 8 ms, and the
# last one completes after 34 ms. So the wait costs time if fast buckets are followed by slow ones.
#
# The reduce-scatters are in flight during backward. The all-gathers follow the optimizer's step, when nothing is left
# to compute, but the lab's `ZeRO2` hides them behind the next forward.

# %% [markdown]
# ## When do gradients determine the peak?
#
# Does the whole step need less memory now? While gradients pile up in backward, activations are freed. Which of the two
# decides the peak?
#
# **Predict.** With samples of 64 tokens, how high is the peak with `ReduceDuringBackward`, as a fraction of the peak
# with `ReduceAfterBackward`? 1 means that they are equal. And what is the fraction if every block is checkpointed, as
# in chapter 06?

# %%
my_prediction, my_prediction_checkpointed = None, None

# %%
# %%ranks
from torch.utils.checkpoint import checkpoint

longer, peaks = text.windows(range(rank, 200, 100), length=64), {}
for name in ("", ", checkpointed"):
    for kind in (ReduceAfterBackward, ReduceDuringBackward):
        zero2 = kind(TinyGPT(config))
        for block in zero2.module.blocks if name else ():
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
        peak = measure.costs(zero2, zero2, *longer).peak
        peaks[kind.__name__ + name] = peak.held.by_component()

# %% [markdown]
# Each bar is a rank's peak. Compare them in pairs:

# %%
peaks = ranks.pull("peaks")[0]
after, during, after_again, during_again = (sum(parts.values()) for parts in peaks.values())
print(f"plain: {predicted(my_prediction)}measured {during / after:.2f}")
fraction = during_again / after_again
print(f"checkpointed: {predicted(my_prediction_checkpointed)}measured {fraction:.2f}")
assert abs(during / after - 1) < 0.1 and fraction < 0.9
plots.memory_by_component(peaks)

# %% [markdown]
# Without checkpointing, our work gains nothing, because activations determine the peak. They are highest when
# backward *begins*, with hardly any gradients. With checkpointing, gradients determine the peak, and reducing them
# during backward takes a fifth off it.

# %% [markdown]
# ## Several micro-batches
#
# Is there a price in bytes? Data parallelism sends 2f · 4Ψ bytes per step (chapter 03). With one micro-batch, ZeRO-2
# sends as much: f · 4Ψ for the reduce-scatters and f · 4Ψ for the all-gathers (Rajbhandari et al. 2020, "ZeRO", §7).
#
# With several, you have to choose. `no_sync()` lets gradients accumulate, and only the last backward reduces them
# (chapter 04). Until then, every rank accumulates *full* gradients: the memory that ZeRO-2 has just saved. Or we reduce
# the gradients of every micro-batch, so that only this rank's shards accumulate. What does that cost?
#
# **Predict.** You accumulate four micro-batches, and reduce the gradients of each one. How many times f · 4Ψ bytes does
# a step send? For one micro-batch, the answer is 2.

# %%
my_prediction = None


# %%
# %%ranks
def accumulate(micro_batches, last_only):
    """Run a step. Returns the bytes sent, and the most bytes of gradients and buckets."""
    zero2 = ReduceDuringBackward(TinyGPT(config))
    with wire.ledger() as log, memory.peak(zero2, zero2) as peak:
        for remaining in reversed(range(micro_batches)):
            zero2.enabled = remaining == 0 or not last_only
            (zero2(*sample) / micro_batches).backward()
            zero2.finish_gradient_sync()
        zero2.step()
    return log.sent_bytes, max(in_backward(peak))


results = {each: accumulate(*each) for each in ((1, False), (4, False), (4, True))}

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
rows = []
for (g, last_only), (sent_bytes, most_bytes) in ranks.pull("results")[0].items():
    stage, name = (1, "the last one") if last_only else (2, "each one")
    assert sent_bytes == formulas.step_sent_bytes(full_bytes / 4, 4, stage, 4, micro_batches=g)
    assert (most_bytes > full_bytes) == last_only
    sent = sent_bytes / formulas.all_gather_sent_bytes(full_bytes, 4)
    rows.append([f"{g}", name, f"{sent:g}", f"{most_bytes / full_bytes:.2f}"])
print(f"{predicted(my_prediction)}measured {rows[1][2]}")
header = ["micro-batches", "reduced", "sent, in f · 4Ψ", "gradients and buckets at the peak, in 4Ψ"]
tables.Table(header, rows)

# %% [markdown]
# Low memory or few bytes: compare the last two rows. With g micro-batches, a step sends (g + 1) times f · 4Ψ bytes: one
# reduce-scatter per micro-batch, and one all-gather after the optimizer's step. If only the last micro-batch is
# reduced, the factor remains 2, but each rank needs room for full gradients, plus the buckets. If you have that room,
# use lab 07's ZeRO-1: it is simpler, sends the same bytes, and with `module=`, it also overlaps backward.
#
# Pipeline parallelism needs many micro-batches, so it usually comes with ZeRO-1 (chapter 15). DeepSpeed's pipeline
# engine even rejects stages 2 and 3 (`deepspeed/runtime/pipe/engine.py`).

# %% [markdown]
# ## The production version
#
# Does torch have a ZeRO-2? Almost. **FSDP2** is torch's `fully_shard`, which shards parameters, gradients and optimizer
# state over a **mesh**, an arrangement of the ranks. You call it for each block and for the model:
#
# ```python
# for module in (*model.blocks, model):
#     fully_shard(module, mesh=mesh, reshard_after_forward=False)
# ```
#
# With `reshard_after_forward=False`, it keeps all parameters from forward until backward has used them. This is the
# closest thing in torch, and in the lab, you compare it with yours. But it is not quite ZeRO-2:
#
# - **Parameters.** Between steps, FSDP2 shards the parameters, too, so it holds less. While it computes, it holds full
#   copies next to its shards.
# - **The wait.** FSDP2 also waits for one reduce-scatter before it copies gradients for the next one, and can stall as
#   in our example. In torch 2.13, `set_reduce_scatter_max_input_buffers` removes the stall: it allows more in flight,
#   at the cost of memory.
#
# DeepSpeed's stage 2 all-reduces a bucket, and each rank keeps its slice, because `use_multi_rank_bucket_allreduce` is
# on by default. The lab measures what that changes. If the option is false, DeepSpeed runs one `reduce` per owner
# (version 0.19.8, `average_tensor` in `stage_1_and_2.py`). Either way, a rank owns a contiguous range of the model,
# which we rejected above, and every micro-batch is reduced: `no_sync()` raises an error for stages 2 and 3 (DeepSpeed
# issue 6793).

# %% [markdown]
# ## Recap
#
# Ψ parameters in fp32, AdamW, N ranks, g micro-batches, f = (N−1)/N. "Gradients" includes the buckets.
#
# | | parameters and optimizer | gradients at the peak | sent per rank and step |
# |---|---|---|---|
# | data parallelism | 4Ψ + 8Ψ | 4Ψ | 2f · 4Ψ |
# | ZeRO-1 | 4Ψ + 8Ψ/N | 4Ψ | 2f · 4Ψ |
# | ZeRO-2 | 4Ψ + 8Ψ/N | 4Ψ/N and about 3 buckets | (g + 1)f · 4Ψ |
# | ZeRO-2, only the last micro-batch reduced | 4Ψ + 8Ψ/N | 4Ψ and buckets | 2f · 4Ψ |
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
# - `post_backward` in `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`: the wait of this lesson, in torch.

# %% [markdown]
# ## What is still wasted
#
# Of 16 bytes per parameter, each of four ranks still holds 7 at the optimizer's step, and 4 of these are the parameters
# themselves. Does every rank need all of them all the time? Only one of the six blocks computes at a time, and the
# parameters of the others could stay sharded until it is their turn. That is ZeRO-3 (chapter 09).
#
# But first, you build the wrapper `ZeRO2` in the lab. It also works with unused parameters and with `no_sync()`.

# %%
ranks.stop()
