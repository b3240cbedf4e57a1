# ---
# jupyter:
#   course:
#     module: overlapped_ddp
# ---

# %% [markdown]
# # 04 · Overlap
#
# **45–65 minutes.** After this lesson, you will be able to:
#
# - launch all-reduces from hooks while backward computes, and wait for them afterwards,
# - predict how much communication stays exposed, for any bucket cap and link,
# - explain why all ranks must launch their buckets in the same order,
# - let autograd end the synchronization, so that no training loop can forget it,
# - find a missing `wait()` that gloo hides.
#
# You need α, β, the ring and asynchronous collectives (chapter 01), gradient accumulation (chapter 02), and the
# `Bucket` and `BucketedDDP` of chapter 03.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Where we are
#
# In chapter 03, you packed many gradients into a few buckets. But while backward computes, the link is idle, and while
# the link is busy, the rank is idle. In the first timeline below, waiting is almost half of the step. You do not have
# to send less, only earlier. In this chapter, the all-reduces start during backward.
#
# To see how much time that saves, we need a slow network. So each rank gets an *emulated* link of 500 Mbit/s, with a
# latency of 1 ms per message: gloo still sends the bytes, but no collective completes earlier than it would on such a
# link. Each link runs one collective at a time, as NCCL does within one process group. The ranks use the CPU, even if
# you have GPUs.

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks
from shared.plots import diagrams
from shared.plots import scaling as scaling_plots
from shared.predictions import predicted

measure.start_behind_link(world_size=4, rate="500mbit", latency_ms=1.0, emulate=True)

# %% [markdown]
# We also need computation. Your ranks share the cores of one machine, and sending needs these cores, too. A GPU would
# leave them free while it computes. So each block of our GPT contains a *stand-in for a GPU*: in addition to its small
# computation, it sleeps for 16 ms in forward and for 32 ms in backward.

# %%
# %%ranks
from shared import measure
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
sample = text.windows([1000 * rank], length=16)


def new_model():
    model = TinyGPT(config)
    stand_in_for_gpu(model.blocks, forward_ms=16, backward_ms=32)
    return model


gradients_bytes = sum(parameter.nbytes for parameter in new_model().parameters())
print(f"{gradients_bytes / 1e6:.2f} MB of gradients")

# %% [markdown]
# ## What is wasted
#
# Chapter 03's `BucketedDDP` with a cap of 2 MB splits these gradients into seven buckets, and all-reduces them after
# backward. A ring all-reduce of S bytes on N ranks takes $2(N-1)\,\alpha + \frac{2(N-1)}{N}\,S\,\beta$ seconds (chapter
# 01). Here, α is 1 ms, and at 500 Mbit/s, β is 16 ns per byte.
#
# **Predict.** How many milliseconds do the seven all-reduces take in total?

# %%
my_prediction_ms = None

# %%
# %%ranks
from solutions.bucketed_ddp import BucketedDDP

bucketed = BucketedDDP(new_model(), bucket_cap_mb=2.0)
lines = measure.recorded_step(bucketed, *sample)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
before = ranks.pull("lines")[0][0]  # the step as rank 0 saw it
print(f"{predicted(my_prediction_ms, '{} ms')}measured {before.exposed_ms:.0f} ms")
plots.timeline([before])

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
from shared import formulas

S = ranks.pull("gradients_bytes")[0]
assert round(1e3 * formulas.all_reduce_sent_bytes(S, 4) * 8 / 500e6) == 258
assert len(before.lane("communication")) == 7
measure.expect(before.overlap < 0.1, "nothing overlaps")

# %% [markdown] slideshow={"slide_type": "-"}
# By the formula, the bytes take 258 ms, and seven latencies of 6 ms another 42. All seven all-reduces are launched when
# backward has ended, so their bars overlap. But the link runs them one after the other, while rank 0 waits (hatched).
# This waiting is what we want to get rid of, so it needs a name.
#
# **Exposed communication** is the time during which a collective is in flight and the rank has nothing to compute.
# While the rank computes, the communication is **hidden**. The text beside the timeline states both.
#
# In the gap before the waits, rank 0 copies gradients into buckets. Bar 1 is the small first bucket, 0.6 MB, so by the
# formula it takes 20 ms. If it is much longer, another rank ended its backward later: no all-reduce is complete before
# the last rank has launched it.
#
# In the next figure, whose times are invented, compare the two brackets labeled "exposed".

# %% slideshow={"slide_type": "slide"}
diagrams.exposed_communication()

# %% [markdown] slideshow={"slide_type": "-"}
# The lower half shows the idea of this chapter. Backward computes the gradients of the last layer first. When they are
# ready, most of backward is still to come, so we could launch their all-reduce right then.

# %% [markdown]
# ## Communicating in a hook
#
# How do we find out that a gradient is ready? A **hook** is a function that you register and that autograd calls. We
# register one on each parameter with `register_post_accumulate_grad_hook`. Autograd calls it with the parameter when
# backward has accumulated the whole gradient in `parameter.grad`.
#
# The simplest hook averages this one gradient. With `async_op=True`, `dist.all_reduce` launches the all-reduce and
# returns a handle at once, and gloo transfers the bytes on threads of its own. When should we wait for the handle? The
# wrapper below can do it in the hook, or in `finish_gradient_sync()`, when backward has ended. The rest is chapter 02's
# `ManualDDP`.


# %%
# %%ranks
from solutions.manual_ddp import ManualDDP


class PerParameterDDP(ManualDDP):
    """Averages each gradient with an all-reduce of its own, launched when the gradient is ready."""

    def __init__(self, module, waits_in_hook):
        super().__init__(module)
        self.waits_in_hook, self.handles = waits_in_hook, []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        parameter.grad /= world_size
        self.handles.append(dist.all_reduce(parameter.grad, async_op=True))
        if self.waits_in_hook:
            self.finish_gradient_sync()

    def finish_gradient_sync(self):
        while self.handles:
            self.handles.pop(0).wait()


# %% [markdown]
# **Predict.** All 52 all-reduces, one per parameter, now start during backward. How many milliseconds of communication
# are exposed in each case? A prediction of 0 means that everything is hidden.

# %%
my_prediction_ms = {"waiting in the hook": None, "waiting after backward": None}

# %%
# %%ranks
exposed_ms = {}
for name, waits_in_hook in {"waiting in the hook": True, "waiting after backward": False}.items():
    model = PerParameterDDP(new_model(), waits_in_hook)
    exposed_ms[f"per parameter, {name}"] = measure.recorded_step(model, *sample)[0].exposed_ms

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
print(predicted(tuple(my_prediction_ms.values()), "{} ms and {} ms", "\n"), end="")
exposed_ms = {"buckets, after backward": before.exposed_ms} | ranks.pull("exposed_ms")[0]
plots.bars(exposed_ms, "ms exposed")

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
buckets_ms, in_hook_ms, afterwards_ms = exposed_ms.values()
measure.expect(buckets_ms < afterwards_ms < in_hook_ms, "an all-reduce per parameter exposes more")

# %% [markdown] slideshow={"slide_type": "-"}
# Both versions expose more than buckets after backward. 52 all-reduces have 52 · 6α = 312 ms of latency, compared with
# 7 · 6α = 42 ms for seven buckets, so they take 570 ms in total. Waiting in the hook blocks backward until the
# all-reduce is complete, and hides almost nothing. Its bar can even exceed 570 ms, because each of these all-reduces
# also waits for the slowest rank. Waiting later hides what fits into the 200 ms of backward.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Hooks and buckets together
#
# Now we combine both ideas: a hook packs each gradient into its bucket, and a bucket is launched when it is full. In
# the figure, follow one gradient from the layer that computes it to its bucket, and from there to the all-reduce.

# %% slideshow={"slide_type": "-"}
diagrams.hooks()

# %% [markdown]
# In chapter 03's `Bucket`, `pack(index)` divides one gradient by N and puts it into the flat tensor, `launch()` starts
# the all-reduce and returns at once, and `wait()` waits for it. In the timelines below, look at where the bars begin:
# each begins when its bucket is launched, even if the link is still busy with another one.


# %%
# %%ranks
from functools import partial


class HookedDDP(BucketedDDP):
    """Launches a bucket as soon as its last gradient is ready, and waits for all buckets after backward."""

    def __init__(self, module, bucket_cap_mb=2.0):
        super().__init__(module, bucket_cap_mb)
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
            for index, parameter in enumerate(bucket.parameters):
                hook = partial(self.on_gradient, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)

    def on_gradient(self, bucket, index, parameter):
        bucket.pack(index)
        bucket.missing -= 1
        if bucket.missing == 0:
            bucket.launch()

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            bucket.wait()
            bucket.missing = len(bucket.parameters)


hooked = HookedDDP(new_model())
lines = measure.recorded_step(hooked, *sample)

# %% tags=["claims"] jupyter={"source_hidden": true}
# %%ranks
pairs = zip(bucketed.parameters(), hooked.parameters(), strict=True)
assert all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
after = ranks.pull("lines")[0][0]
plots.timeline([before, after], ["after backward", "with hooks"])

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(after.exposed_ms < before.exposed_ms, "hooks hide communication")

# %% [markdown] slideshow={"slide_type": "-"}
# The buckets and the gradients are the same as before, but now part of the communication is hidden. Overlap is not
# free: copies and launches are part of backward now, while gloo sends on the same cores, so backward takes longer. How
# much longer does a whole step take because of communication? You will measure that in lab 05.

# %% [markdown]
# ## Predicting what stays exposed
#
# Not everything can be hidden, because the last bucket is full only when backward ends. The link runs one all-reduce at
# a time. If bucket *i* is full at time $\text{full}_i$ and its all-reduce takes $t_i$, it completes at
#
# $$e_i = \max(e_{i-1},\ \text{full}_i) + t_i$$
#
# With this *recurrence*, the exposed time is $\max(0,\ e_\text{last} - \text{end of backward})$.
#
# In the lower timeline, `HookedDDP` launched each bucket when it was full, so we know $\text{full}_i$, and α and β give
# $t_i$. In the figure, which buckets are full, but wait for the one before?

# %% tags=["nbval-ignore-output"]
scaling_plots.schedule(after, ranks=4, alpha_s=1e-3, beta_s=8 / 500e6)

# %% [markdown]
# Compare the gray area with the exposed time in the timeline. They agree, but that proves little: the emulated link
# computes with this very formula. Chapter 05 tests it on a link that does not.
#
# ## When is overlap worth it?
#
# Suppose your cluster has a faster link. Would you still write this wrapper, and with which bucket cap? A large bucket
# is full later, and the link may be idle until then. But a small cap makes many buckets, and each adds a latency of 6α.
#
# The recurrence can tell, because it also predicts steps that we have not run. We only need to know when the buckets
# would be full. `measure.ready_fractions` measures when each gradient is ready, as a fraction of the step, while
# nothing is sent. It works on torch's DDP, so we give it that.


# %%
# %%ranks
from itertools import accumulate

from torch.nn.parallel import DistributedDataParallel

from shared import formulas
from solutions.bucketed_ddp import assign_buckets

ddp = DistributedDataParallel(new_model(), bucket_cap_mb=2.0)
fractions = measure.ready_fractions(ddp, *sample)
compute_s = lines[0].compute_ms / 1e3


def exposed_parts(cap_mb, gbit_per_s, alpha_s):
    """Predict the exposed time, as a part of the computing time, if buckets are launched after or during backward."""
    buckets = assign_buckets(ddp.parameters(), cap_mb)
    sizes = [sum(parameter.nbytes for parameter in bucket) for bucket in buckets]
    takes_s = [formulas.ring_all_reduce_s(size, 4, alpha_s, 8e-9 / gbit_per_s) for size in sizes]
    # A bucket is full when its last gradient is ready. Backward goes through the layers in the order of the buckets.
    full_s = [compute_s * fractions[count - 1][0] for count in accumulate(map(len, buckets))]
    return sum(takes_s) / compute_s, formulas.exposed_s(full_s, takes_s, compute_s) / compute_s


# %% [markdown]
# The next figure shows our model behind links of 0.5, 5 and 50 Gbit/s. A faster link usually has a lower latency, too,
# so α falls from 1 ms to 0.1 and 0.02 ms. The dashed lines launch all buckets after backward, so the gray area is what
# overlap saves with each cap. The titles say what it saves if each line uses its best cap, the circle. Only two things
# are measured here: the computing time, and when the gradients are ready.
#
# **Predict.** On which of the three links does overlap save most, as a part of the computing time?

# %%
my_prediction_gbit_per_s = None

# %%
# %%ranks
caps_mb = [0.25 * 100 ** (index / 60) for index in range(61)]
panels = {}
for gbit_per_s, alpha_ms in {0.5: 1, 5: 0.1, 50: 0.02}.items():
    title = f"{gbit_per_s:g} Gbit/s, α = {alpha_ms:g} ms"
    panels[title] = {cap: exposed_parts(cap, gbit_per_s, alpha_ms / 1e3) for cap in caps_mb}

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
print(predicted(my_prediction_gbit_per_s, "{} Gbit/s", "\n"), end="")
scaling_plots.exposed_by_cap(ranks.pull("panels")[0])

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
panels = ranks.pull("panels")[0].values()
at_once, least = ([min(part[when] for part in each.values()) for each in panels] for when in (0, 1))
saves = [after - during for after, during in zip(at_once, least, strict=True)]
measure.expect(saves[0] > 0.25 and 0.03 < saves[1] < 0.15 and saves[2] < 0.02, "overlap saves less")
measure.expect(
    least[0] > 0.2 and least[1] < 0.05, "the slow link exposes much, the middle one little"
)
slow = {cap: during for cap, (_, during) in next(iter(panels)).items()}
measure.expect(0.5 < min(slow, key=slow.get) < 8, "the best cap lies in between")

# %% [markdown] slideshow={"slide_type": "-"}
# Overlap can never save more than the shorter of the two: backward, or the all-reduces.
#
# - At 0.5 Gbit/s, the all-reduces are longer than backward. Overlap saves the most here, and much is still exposed.
#   Buckets wait for each other, so it matters how early the *first* one is launched. With a cap of 25 MB, everything
#   except the small first bucket waits for the end of backward. With 0.25 MB, there are 31 buckets, and their latencies
#   alone take 31 · 6α = 186 ms. The best cap lies in between.
# - At 5 Gbit/s, most of the communication is hidden. Only buckets that are full at the *very end* stay exposed. Any cap
#   up to about 8 MB leaves little exposed, but one of 25 MB exposes nearly everything.
# - At 50 Gbit/s, the all-reduces take about 1% of the step. Chapter 03's wrapper would do.
#
# If a GPU computed this backward a hundred times as fast, 50 Gbit/s would look much like the first panel. What counts
# is the ratio of communication to backward, and chapter 05 turns it into a rule.
#
# What is in the last bucket? The parameters that forward uses first: the embedding. For Llama-3 8B, with a vocabulary
# of 128,256 and a width of 4,096, its gradient takes 1 GB in bf16. The output layer's gradient is as large, but
# complete first. The embedding's comes when nothing is left to hide it.

# %% [markdown]
# ## One launch order on every rank
#
# In our GPT, all ranks fill their buckets in the same order. In other models, the order may depend on the data, for
# instance if different inputs use different layers. Here is the smallest such model. The gradients of its two
# parameters are 1 and 10. Rank 0 uses `a` first, so its backward computes the gradient of `b` first. On the other
# ranks, it is the other way around:


# %%
# %%ranks
class TwoBranches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(1))
        self.b = torch.nn.Parameter(torch.ones(1))

    def forward(self):
        return 1 * self.a + 10 * self.b if rank == 0 else 10 * self.b + 1 * self.a


# %% [markdown]
# If each parameter has a bucket of its own, rank 0 launches the bucket of `b` first, while the others launch that of
# `a`. Both buckets have four bytes, so gloo accepts this.
#
# **Predict.** Which gradients does rank 0 get from `HookedDDP`? The right averages are 1 for `a` and 10 for `b`.

# %%
my_prediction = {"a": None, "b": None}

# %%
# %%ranks
branches = HookedDDP(TwoBranches(), bucket_cap_mb=1e-6)
branches().backward()
branches.finish_gradient_sync()
print(f"a {branches.module.a.grad.item():.2f}, b {branches.module.b.grad.item():.2f}")

# %% [markdown]
# The first all-reduce added rank 0's `b` to the other ranks' `a`: (10 + 1 + 1 + 1) / 4 = 3.25. There was no error, but
# the gradients are wrong and differ between ranks. Buckets of different sizes might have caused a hang or a crash. So a
# wrapper must follow two rules (Li et al., VLDB 2020, §3.2.3):
#
# 1. **One order.** A bucket is launched when it is full *and all buckets before it have been launched*.
# 2. **Every bucket on every rank.** If a parameter is unused on a rank, its gradient counts as zeros. Otherwise its
#    bucket would never be full, and the other ranks would wait forever.
#
# Your wrapper in the lab will follow both rules. So does torch's DDP, but the second one only if you pass
# `find_unused_parameters=True`: by default, the next forward on that rank raises an error. How does your wrapper know
# that a parameter is unused? Once backward is over, every gradient that is still missing belongs to an unused
# parameter.

# %% [markdown]
# ## A call that nobody can forget
#
# So far, every training loop had to call `finish_gradient_sync()` before the step. What happens if one forgets it? The
# next cell trains a single weight for ten steps without that call. Each rank fits its own target, `rank`, so together
# they should approach the mean, 1.5.


# %% tags=["nbval-ignore-output"]
# %%ranks
def forgetful(wrapper):
    """Fit one weight, and never call finish_gradient_sync(). Returns the weight."""
    model = wrapper(torch.nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    for _ in range(10):
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) - rank).square().sum().backward()
        optimizer.step()
    return model.module.weight.item()


weight = forgetful(HookedDDP)
print(f"weight {weight:.1f}")

# %% tags=["claims"] jupyter={"source_hidden": true}
assert len({round(weight, 1) for weight in ranks.pull("weight")}) == 4

# %% [markdown]
# There is no error. But these are four models, and each approaches its own target, slowly, because `pack` still divides
# every gradient by 4. `missing` was never reset after the first step, so no bucket was launched again.
#
# With torch's DDP and FSDP2, this cannot happen: they have no such call, because when `backward()` returns, the
# gradients are averaged. So autograd must have told them that backward has ended. A hook can ask for that:
# `queue_callback` takes a function, and autograd calls it when the running backward has computed all gradients. The
# first gradient of each backward asks for `finish_gradient_sync`:


# %%
# %%ranks
from torch.autograd import Variable


class FinishingDDP(HookedDDP):
    """Waits for its buckets when backward ends."""

    def on_gradient(self, bucket, index, parameter):
        if all(each.missing == len(each.parameters) for each in self.buckets):
            Variable._execution_engine.queue_callback(self.finish_gradient_sync)
        super().on_gradient(bucket, index, parameter)


print(f"weight {forgetful(FinishingDDP):.1f}")

# %% [markdown]
# Now every rank has the same weight, the mean of the targets. The engine's name begins with an underscore, so torch may
# change it. But torch's own wrappers need it, too: FSDP2 makes this very call, and DDP makes it in C++.
#
# One case remains. On a rank that has run out of batches, no hook runs, while the other ranks wait for its buckets. So
# if that can happen, all ranks call `finish_gradient_sync()` once in every step, after backward. In the lab, this call
# does nothing where backward has done everything. For the same case, torch's DDP has a context manager, `join()`.

# %% [markdown]
# ## Communicating for the last micro-batch only
#
# When you accumulate gradients over micro-batches, only their sum has to be averaged. But hooks fire in every backward.
# So torch's DDP has a context manager, **`no_sync()`**. Inside it, gradients accumulate without communication.
#
# **Predict.** You accumulate four micro-batches, the first three of them inside `no_sync()`. How many bytes does DDP
# all-reduce, as a multiple of the bytes of the gradients? And what if only the *backward* of these three is inside it,
# but not their forward? 1 would mean that DDP all-reduces each gradient once.

# %%
my_prediction = {"forward inside": None, "forward outside": None}

# %%
# %%ranks
from shared import wire

with wire.ledger() as inside:
    with ddp.no_sync():
        for _ in range(3):
            ddp(*sample).backward()
    ddp(*sample).backward()
with wire.ledger() as outside:
    for _ in range(3):
        loss = ddp(*sample)
        with ddp.no_sync():
            loss.backward()
    ddp(*sample).backward()
for name, log in {"forward inside": inside, "forward outside": outside}.items():
    print(f"{name}: {log.payload_bytes / gradients_bytes:.0f} ×")

# %% [markdown]
# With forward inside, each gradient is all-reduced once, for all four micro-batches together. With forward outside, it
# is all-reduced four times: DDP reads its flag in *forward*, so a `no_sync()` around backward comes too late. The
# gradients are right in both cases, so no test of values finds this bug. In your wrapper, the hooks will read the flag.

# %% [markdown]
# ## The production version
#
# What would you gain from torch's DDP? Not another design: ours is taken from it (Li et al., VLDB 2020, §3.2.3 and §4).
# But DDP runs in C++, and has more options:
#
# | option | what it does |
# |---|---|
# | `find_unused_parameters=True` | searches the graph after each forward, and all-reduces a "used" flag per parameter |
# | `register_comm_hook` | replaces each all-reduce with a **communication hook**, such as one that sends bfloat16 |
# | `forward_sync_buffers` (was `broadcast_buffers`) | on by default: rank 0 broadcasts buffers before each forward |
#
# In a trace of `torch.profiler` from a GPU, look for the picture of this lesson: NCCL has a row of its own, with
# kernels named `ncclDevKernel_AllReduce…`. Where kernels of backward run above one of them, communication is hidden.
# Where the row of the computation is empty, it is exposed.

# %% [markdown]
# ## A bug that gloo hides
#
# The collectives of this lesson ran on the CPU, where gloo's own threads write the results into your tensors. NCCL's
# asynchronous collectives run on a *stream* (a queue of GPU operations) of their own. Your other operations are queued
# in the *current stream*. `launch()` only queues the collective, and `wait()` does not block your program: it makes the
# current stream wait for the collective.
#
# The next cell starts new ranks, and in the cell after it, the call to `wait()` is missing. The `sleep` stands for the
# rest of backward. `detect_mismatch=False` switches off mismatch detection, so that only the collective itself runs.

# %% tags=["nbval-ignore-output"]
ranks.start(world_size=2, backend="gloo:cpu", detect_mismatch=False)

# %%
# %%ranks
import time

gradient = torch.full((4,), float(rank))
dist.all_reduce(gradient, async_op=True)
time.sleep(1)
print(gradient / world_size)

# %% [markdown]
# The average of 0 and 1 is 0.5, so the result is right. By the time the cell divides, gloo has finished, so a test on
# gloo passes. On a GPU, nothing makes the division wait for the all-reduce. If it runs first, the optimizer takes a
# step with wrong gradients.
#
# You can find such bugs without a GPU. With `simulate="nccl"`, the ranks still use gloo, but follow NCCL's rules: until
# you call `wait()`, the output holds NaN, and using it raises an error. Here is the same cell again:

# %% tags=["nbval-ignore-output"]
ranks.start(world_size=2, backend="gloo:cpu", simulate="nccl", detect_mismatch=False)

# %% tags=["raises-exception"]
# %%ranks
import time

gradient = torch.full((4,), float(rank))
dist.all_reduce(gradient, async_op=True)
time.sleep(1)
print(gradient / world_size)

# %% [markdown]
# The error names both lines: the one that launched the all-reduce, and the one that used its output too early. The
# repair is to keep the handle, and to call its `wait()` before the division. The simulation also raises an error if you
# change or free a tensor that a collective still uses.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Recap
#
# Three things worth keeping:
#
# - **eᵢ = max(eᵢ₋₁, fullᵢ) + tᵢ**: when bucket *i* completes. The exposed time is max(0, e_last − end of backward).
# - **Overlap saves at most the shorter of backward and the all-reduces.** The buckets that are full last stay exposed.
# - **Every rank launches every bucket, in one order**, and autograd finishes them when backward ends.
#
# **Terms**
#
# - **exposed communication**: the time during which a collective is in flight and the rank has nothing to compute.
# - **hidden communication**: the time during which a collective is in flight while the rank computes.
# - **hook**: a function that you register and that autograd calls, for instance when a gradient is ready.
# - **`no_sync()`**: a context manager inside which a wrapper accumulates gradients without communication.
# - **communication hook**: a function that replaces the all-reduce of each bucket in torch's DDP.
#
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): how to see overlap, buckets and their order there.
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020 (arXiv 2006.15704):
#   §3.2.3 on overlap and the order of buckets, and the evaluation of bucket sizes on NCCL and gloo.
# - *The Ultra-Scale Playbook*, Hugging Face, section "Data Parallelism": overlap, bucketing and accumulation as three
#   optimizations, with profiles.
# - *Introduction to Holistic Trace Analysis*, PyTorch tutorials: idle time and overlap, from traces of many ranks.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What is still wasted
#
# Communication is now hidden where it can be. But each step on four ranks still takes longer than a step without
# communication. How much longer will it be on 8, 64 or 512 ranks? Chapter 05 measures it on your ranks, and computes it
# for more of them.
#
# But first, in the lab, you build `OverlappedDDP`.

# %%
ranks.stop()
