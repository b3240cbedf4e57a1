# ---
# jupyter:
#   course:
#     module: overlapped_ddp
# ---

# %% [markdown]
# # 04 · Overlap
#
# **60–100 minutes.** After this lesson, you will be able to:
#
# - launch all-reduces from hooks while backward computes, and wait for them afterwards,
# - predict how much communication stays exposed, and choose the bucket cap that leaves the least,
# - explain why all ranks must launch their buckets in the same order,
# - let autograd end the synchronization, so that no training loop can forget it,
# - measure what communication costs a training step, and find a missing `wait()` that gloo hides.
#
# You need α, β, the ring and asynchronous collectives (chapter 01), gradient accumulation (chapter 02), and the
# `Bucket` and `BucketedDDP` of chapter 03.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Where we are
#
# In chapter 03, you packed many gradients into a few buckets. Look at what that wrapper does: while backward computes,
# the link is idle, and while the link is busy, the rank is idle. In the first timeline below, waiting is almost half of
# the step. You do not have to send less, only earlier. In this chapter, the all-reduces start during backward.
#
# To see how much time that saves, we need a slow network. So each rank gets an *emulated* link of 500 Mbit/s, with a
# latency of 1 ms per message: gloo still sends the bytes, but no collective completes earlier than it would on such a
# link. Each link runs one collective at a time, as NCCL does within one process group. The ranks use the CPU, even if
# you have GPUs.

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks, tables
from shared.plots import costs, diagrams
from shared.plots import scaling as scaling_plots
from shared.predictions import predicted

measure.start_behind_link(world_size=4, rate="500mbit", latency_ms=1.0, emulate=True)

# %% [markdown]
# A ring all-reduce of S bytes on N ranks takes $2(N-1)\,\alpha + \frac{2(N-1)}{N}\,S\,\beta$ seconds, where α is the
# latency of a message (one step of the ring), and β is the time per byte (chapter 01). You fitted both there. Here, we
# set them:

# %%
from shared import formulas

alpha_s = 1e-3
beta_s = 8 / 500e6  # 8 bits per byte, 500 · 10⁶ bits per second


def all_reduce_s(size_bytes):
    return formulas.ring_all_reduce_s(size_bytes, 4, alpha_s, beta_s)


# %% [markdown]
# We also need computation. Your ranks share the cores of one machine, and sending needs these cores, too. A GPU would
# leave them free while it computes. So each block of our GPT contains a *stand-in for a GPU*: in addition to its small
# computation, it sleeps for 16 ms in forward and for 32 ms in backward.

# %%
# %%ranks
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
sample = text.windows([1000 * rank], length=16)


def new_model():
    model = TinyGPT(config)
    stand_in_for_gpu(model.blocks, forward_ms=16, backward_ms=32)
    return model


gradients_bytes = 4 * sum(parameter.numel() for parameter in new_model().parameters())
print(f"{gradients_bytes / 1e6:.2f} MB of gradients")

# %% [markdown]
# ## What is wasted
#
# Chapter 03's `BucketedDDP` with a cap of 2 MB splits these gradients into seven buckets, and all-reduces them after
# backward. As in torch, a cap of 2 MB means 2 MiB, or 2 · 2²⁰ bytes.
#
# **Predict.** How many milliseconds do the seven all-reduces take in total? You know S (from the output above), N = 4,
# α and β.

# %%
my_prediction_ms = None

# %%
# %%ranks
from shared import measure, timeline
from solutions.bucketed_ddp import BucketedDDP


def recorded_step(model):
    """Record seven steps. Returns the one with the median exposed time on rank 0, as one timeline per rank."""
    step = {"step": measure.training_step(model, *sample)}
    lines = measure.recorded(
        step, lambda: timeline.record(model), by=lambda line: line.exposed_ms, rounds=7
    )
    return lines["step"]


bucketed = BucketedDDP(new_model(), bucket_cap_mb=2.0)
print(f"{len(bucketed.buckets)} buckets")
lines = recorded_step(bucketed)

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
before = ranks.pull("lines")[0][0]  # the step as rank 0 saw it
bytes_ms = 1e3 * 2 * (4 - 1) / 4 * ranks.pull("gradients_bytes")[0] * beta_s
latency_ms = 1e3 * 2 * (4 - 1) * alpha_s
print(f"formula: {bytes_ms:.0f} ms for the bytes + 7 · {latency_ms:.0f} ms for the latencies")
print(f"{predicted(my_prediction_ms, '{} ms')}measured {before.exposed_ms:.0f} ms")
measure.expect(before.overlap < 0.1, "nothing overlaps")
plots.timeline([before])

# %% [markdown] slideshow={"slide_type": "-"}
# All seven all-reduces are launched when backward has ended, so their bars overlap. But the link runs them one after
# the other, while rank 0 waits (hatched). This waiting is what we want to get rid of, so it needs a name.
#
# **Exposed communication** is the time during which a collective is in flight and the rank has nothing to compute.
# While the rank computes, the communication is **hidden**. The text beside the timeline states both.
#
# Is bar 1 much longer than 20 ms? Then another rank ended its backward later, and no all-reduce is complete before the
# last rank has launched it. The next bars may then end in quick succession, because the emulated link counts from its
# own rank's launches. On a real link, all of them would be late.
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
# The simplest hook averages this one gradient. For now, `async_op` is False, so `dist.all_reduce` returns only when the
# all-reduce is complete:


# %%
# %%ranks
from torch import nn


class PerParameterDDP(nn.Module):
    """Averages each gradient with an all-reduce of its own, launched when the gradient is ready."""

    def __init__(self, module, async_op):
        super().__init__()
        self.module, self.async_op, self.handles = module, async_op, []
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self.average)

    def average(self, parameter):
        parameter.grad /= dist.get_world_size()
        handle = dist.all_reduce(parameter.grad, async_op=self.async_op)
        if self.async_op:
            self.handles.append(handle)

    def finish_gradient_sync(self):
        while self.handles:
            self.handles.pop(0).wait()

    def forward(self, *inputs):
        return self.module(*inputs)


# %% [markdown]
# **Predict.** All 52 all-reduces, one per parameter, now start during backward. How many milliseconds of communication
# are exposed? A prediction of 0 means that everything is hidden.

# %%
my_prediction_ms = None

# %%
# %%ranks
blocking_lines = recorded_step(PerParameterDDP(new_model(), async_op=False))

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
blocking = ranks.pull("blocking_lines")[0][0]
print(f"{predicted(my_prediction_ms, '{} ms')}measured {blocking.exposed_ms:.0f} ms")
measure.expect(blocking.exposed_ms > before.exposed_ms, "that is slower")
plots.timeline([blocking])

# %% [markdown] slideshow={"slide_type": "-"}
# That is slower than before. The all-reduces now start during backward, but each one blocks backward until it
# completes. Only the time of the launches is hidden. And with 52 latencies instead of seven, the formula gives 258 + 52
# · 6 = 570 ms. The rest is not in the formula: in each of the 52 all-reduces, all ranks wait for the slowest one, and
# gloo itself needs the cores.

# %% [markdown]
# ## Launching now, waiting later
#
# With `async_op=True`, `dist.all_reduce` launches the all-reduce and returns a handle at once. gloo transfers the bytes
# on threads of its own while backward continues. After backward, `finish_gradient_sync()` waits for all handles. In the
# figure, compare the last bar with the other two.

# %%
# %%ranks
launching_lines = recorded_step(PerParameterDDP(new_model(), async_op=True))

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
launching = ranks.pull("launching_lines")[0][0]
measure.expect(launching.exposed_ms < blocking.exposed_ms, "less is exposed than before")
exposed_ms = {
    "buckets, after backward": before.exposed_ms,
    "per parameter, blocking": blocking.exposed_ms,
    "per parameter, asynchronous": launching.exposed_ms,
}
plots.bars(exposed_ms, "ms exposed")

# %% [markdown] slideshow={"slide_type": "-"}
# Less communication is exposed than in the blocking version, and still more than with buckets after backward. The
# reason is latency: 52 all-reduces have 52 · 6α = 312 ms of it, compared with 7 · 6α = 42 ms for seven buckets.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Hooks and buckets together
#
# Now we combine both ideas: a hook packs each gradient into its bucket, and a bucket is launched when it is full. In
# the figure, follow one gradient from the layer that computes it to its bucket, and from there to the all-reduce.

# %% slideshow={"slide_type": "-"}
diagrams.hooks()

# %% [markdown]
# In chapter 03's `Bucket`, `pack(index)` divides one gradient by N and puts it into the flat tensor, `launch()` starts
# the all-reduce and returns at once, and `wait()` waits for it.


# %%
# %%ranks
from functools import partial


class HookedDDP(BucketedDDP):
    """Launches a bucket as soon as its last gradient is ready, and waits for all buckets after backward."""

    def __init__(self, module, bucket_cap_mb=2.0):
        super().__init__(module, bucket_cap_mb)
        self.enabled = True
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)
            for index, parameter in enumerate(bucket.parameters):
                hook = partial(self.on_gradient, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)

    def on_gradient(self, bucket, index, parameter):
        if self.enabled:
            bucket.pack(index)
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.launch()

    def finish_gradient_sync(self):
        for bucket in self.buckets:
            bucket.wait()
            bucket.missing = len(bucket.parameters)


# %%
# %%ranks
hooked = HookedDDP(new_model())
lines = recorded_step(hooked)
pairs = zip(bucketed.parameters(), hooked.parameters(), strict=True)
print("same gradients:", all(torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in pairs))

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
after = ranks.pull("lines")[0]
print(f"exposed: {before.exposed_ms:.0f} ms before, {after[0].exposed_ms:.0f} ms with hooks")
measure.expect(after[0].exposed_ms < before.exposed_ms, "hooks hide communication")
plots.timeline([before, after[0]], ["after backward", "with hooks"])

# %% [markdown] slideshow={"slide_type": "-"}
# The buckets and the gradients are the same as before, but now part of the communication is hidden. Do not compare the
# two backwards in this figure: ranks share cores, so single steps vary. Hooks do make backward longer, and you will
# measure by how much.

# %% [markdown]
# ## Predicting what stays exposed
#
# Not everything can be hidden, because the last bucket is full only when backward ends. The link runs one all-reduce at
# a time. If bucket *i* is full at time $\text{full}_i$ and its all-reduce takes $t_i$, it completes at
#
# $$e_i = \max(e_{i-1},\ \text{full}_i) + t_i$$
#
# The exposed time is $\max(0,\ e_\text{last} - \text{end of backward})$.
#
# Let's follow the last step with it. `HookedDDP` launched each bucket when it was full, so we know $\text{full}_i$, and
# α and β give $t_i$. The emulated link computes with this very formula, so agreement only shows that we count what it
# counts.


# %%
def launches_of(step):
    """Return when each all-reduce of a recorded step was launched, and when backward ended."""
    launched_s = [s.began_s - step.began_s for s in step.spans if s.lane == "communication"]
    return launched_s, max(ended_s for _, ended_s in step.lane("backward")) - step.began_s


def completions_s(full_s, takes_s):
    """Predict when each all-reduce completes."""
    ends_s = [0.0]
    for full, takes in zip(full_s, takes_s, strict=True):
        ends_s.append(max(ends_s[-1], full) + takes)
    return ends_s[1:]


# %% [markdown]
# In the next figure, the bars are the predicted all-reduces of rank 0. Each diamond marks when the all-reduce actually
# completed. Is each diamond at the right end of its bar?

# %% tags=["nbval-ignore-output"]
spans = [span for span in after[0].spans if span.lane == "communication"]
full_s, backward_s = launches_of(after[0])
takes_s = [all_reduce_s(span.payload_bytes) for span in spans]
ends_s = completions_s(full_s, takes_s)
measured_s = [span.ended_s - after[0].began_s for span in spans]
predicted_ms = 1e3 * max(0.0, ends_s[-1] - backward_s)
print(f"exposed: predicted {predicted_ms:.0f} ms, measured {after[0].exposed_ms:.0f} ms")
measure.expect(0.95 < measured_s[-1] / ends_s[-1] < 1.5, "the recurrence comes close")
in_ms = [[1e3 * s for s in times] for times in (full_s, takes_s, ends_s, measured_s)]
scaling_plots.schedule(*in_ms[:3], 1e3 * backward_s, in_ms[3])

# %% [markdown]
# A diamond can be late because gloo itself needs the cores, or because another rank launched the bucket later.
#
# ## Which bucket cap is best?
#
# The formula can also predict a step that we have not run. For another bucket cap, we only need to know when its
# buckets would be full. `measure.ready_fractions` measures when each gradient is ready, as a fraction of the step,
# while nothing is sent. Its model is torch's DDP inside `no_sync()`, which you will meet below. As in lab 03, the first
# bucket holds at most 1 MB, or the cap if that is smaller.

# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

fractions = measure.ready_fractions(DistributedDataParallel(new_model()), *sample)

# %%
from itertools import accumulate

from shared.models import TinyGPT
from solutions.bucketed_ddp import assign_buckets

ready_s = [fraction * backward_s for fraction, _ in ranks.pull("fractions")[0]]
parameters = list(TinyGPT(ranks.pull("config")[0]).parameters())


def predicted_s(cap_mb, takes_s=all_reduce_s, overlaps=True):
    """Predict the exposed time with a bucket cap. `takes_s` is the time of an all-reduce."""
    buckets = assign_buckets(parameters, cap_mb)
    # Backward goes through the layers in the order of the buckets. A bucket is full when its last gradient is ready.
    full_s = [ready_s[count - 1] for count in accumulate(map(len, buckets))]
    if not overlaps:
        full_s = [backward_s] * len(buckets)
    sizes = [sum(parameter.nbytes for parameter in bucket) for bucket in buckets]
    return max(0.0, completions_s(full_s, map(takes_s, sizes))[-1] - backward_s)


# %% [markdown]
# A large bucket is full later (chapter 03), and the link may be idle until then. But a small cap makes many buckets,
# and each adds a latency of 6α.
#
# **Predict.** Which cap leaves the least communication exposed on this link: 0.25, 0.5, 1, 2, 4 or 25 MB?

# %%
my_prediction_cap_mb = None

# %%
# %%ranks --timeout 180
caps_mb = (0.25, 0.5, 1.0, 2.0, 4.0, 25.0)
by_cap = {cap: recorded_step(HookedDDP(new_model(), cap))[0].exposed_ms for cap in caps_mb}

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
by_cap = ranks.pull("by_cap")[0]
predicted_best = min(by_cap, key=predicted_s)
measured_best = min(by_cap, key=by_cap.get)
print(predicted(my_prediction_cap_mb, "{} MB", "\n"), end="")
print(f"best of the six caps: {predicted_best:g} MB by the formula, {measured_best:g} MB measured")
measure.expect(0.25 < predicted_best < 25, "the best cap lies in between")
measure.expect(0.25 < measured_best < 25, "the best measured cap lies in between")
curve, points = {"exposed": predicted_s}, {"exposed": {cap: ms / 1e3 for cap, ms in by_cap.items()}}
best_ms = 1e3 * predicted_s(measured_best)
print(f"{measured_best:g} MB: predicted {best_ms:.0f} ms, measured {by_cap[measured_best]:.0f} ms")
style = {"ylabel": "exposed, ms", "ticks": list(by_cap), "from_zero": True}
costs.predicted_against_measured(curve, points, "cap, MB", **style)

# %% [markdown] slideshow={"slide_type": "-"}
# With a cap of 25 MB, everything except the small first bucket waits for the end of backward. With 0.25 MB, there are
# 31 buckets, and their latencies alone take 31 · 6α = 186 ms. The curve jumps where one more parameter fits into a
# bucket. The marks follow the curve, here within 10 ms. On a busier machine, expect up to 30.
#
# ## When is overlap worth it?
#
# Your cluster has a faster link. Would you still write this wrapper? `predicted_s` can tell: in the next figure, it
# computes the same model behind links of 0.5, 5 and 50 Gbit/s. A faster link usually has a lower latency, too, so α
# falls from 1 ms to 0.1 and 0.02 ms. The dashed lines launch all buckets after backward, so the gray area is what
# overlap saves. Nothing in this figure is measured, except when the gradients are ready.
#
# **Predict.** On which of the three links does overlap save most, as a part of the computing time?

# %%
my_prediction_gbit_per_s = None

# %%
links = {0.5: 1e-3, 5: 1e-4, 50: 2e-5}  # α in s, by Gbit/s
caps = [0.25 * 100 ** (index / 60) for index in range(61)]


def exposed_parts(gbit_per_s, overlaps):
    """Predict the exposed time as a part of the computing time, by bucket cap."""

    def takes_s(size):
        return formulas.ring_all_reduce_s(size, 4, links[gbit_per_s], 8e-9 / gbit_per_s)

    return {cap: predicted_s(cap, takes_s, overlaps) / backward_s for cap in caps}


both = {"after backward": False, "during backward": True}
panels = {
    f"{rate:g} Gbit/s, α = {1e3 * alpha_s:g} ms": {
        name: exposed_parts(rate, overlaps) for name, overlaps in both.items()
    }
    for rate, alpha_s in links.items()
}

# %% tags=["nbval-ignore-output"] slideshow={"slide_type": "slide"}
print(predicted(my_prediction_gbit_per_s, "{} Gbit/s", "\n"), end="")
for name, of_name in panels.items():
    saved = min(of_name["after backward"].values()) - min(of_name["during backward"].values())
    print(f"{name}: overlap saves {saved:.1%} of the computing time")
scaling_plots.exposed_by_cap(panels)

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
least = [min(of_name["during backward"].values()) for of_name in panels.values()]
at_once = [min(of_name["after backward"].values()) for of_name in panels.values()]
saves = [after - during for after, during in zip(at_once, least, strict=True)]
measure.expect(saves[0] > 0.25 and 0.03 < saves[1] < 0.15 and saves[2] < 0.02, "overlap saves less")
measure.expect(
    least[0] > 0.2 and least[1] < 0.05, "the slow link exposes much, the middle one little"
)

# %% [markdown] slideshow={"slide_type": "-"}
# Overlap can never save more than the shorter of the two: backward, or the all-reduces.
#
# - At 0.5 Gbit/s, the all-reduces are longer than backward. Overlap saves the most here, and much is still exposed.
#   Buckets wait for each other, so it matters how early the *first* one is launched.
# - At 5 Gbit/s, overlap is at its best: nearly everything is hidden. Only buckets that are full at the *very end* stay
#   exposed. With a cap of 2 MB, there are two, because our stand-in sleeps before the gradients of a block are ready.
#   Any cap up to about 8 MB leaves little exposed; one of 25 MB, nearly everything.
# - At 50 Gbit/s, the all-reduces take about 1% of the step. Chapter 03's wrapper would do.
#
# If a GPU computed this backward a hundred times as fast, 50 Gbit/s would look much like the first panel. What counts
# is the ratio of the two times, and chapter 05 turns it into a rule.
#
# What is in the last bucket? The parameters that forward uses first: the embedding. For Llama-3 8B, with a vocabulary
# of 128,256 and a width of 4,096, its gradient takes 1 GB in bf16. The output layer's is as large, but complete first.
# The embedding's comes when nothing is left to hide it.

# %% [markdown]
# ## One launch order on every rank
#
# `HookedDDP` launches a bucket when it is full. In our GPT, all ranks fill their buckets in the same order. In other
# models, the order may depend on the data, for instance if different inputs use different layers. Here is the smallest
# such model. The gradients of its two parameters are 1 and 10, and `order` says which parameter forward uses first.


# %%
# %%ranks
class TwoBranches(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(1))
        self.b = nn.Parameter(torch.ones(1))

    def forward(self, order):
        use = {"a": lambda: 1 * self.a, "b": lambda: 10 * self.b}
        return sum([use[name]() for name in order])


order = "ab" if rank == 0 else "ba"

# %% [markdown]
# Rank 0 uses `a` first, so its backward computes the gradient of `b` first. On the other ranks, it is the other way
# around. If each parameter has a bucket of its own, rank 0 launches the bucket of `b` first, while the others launch
# that of `a`. Both buckets have four bytes, so gloo accepts this.
#
# **Predict.** Which gradients does rank 0 get from `HookedDDP`? The right averages are 1 for `a` and 10 for `b`.

# %%
my_prediction = {"a": None, "b": None}

# %%
# %%ranks
branches = HookedDDP(TwoBranches(), bucket_cap_mb=1e-6)
branches(order).backward()
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
# Your wrapper in the lab will follow both rules, and so does torch's DDP. In the second step of the next cell, rank 3
# does not use `a`:

# %%
# %%ranks
ddp = DistributedDataParallel(TwoBranches(), bucket_cap_mb=1e-6, find_unused_parameters=True)
for used in (order, "b" if rank == 3 else "ab"):
    ddp.zero_grad()
    ddp(used).backward()
    print(f"a {ddp.module.a.grad.item():.2f}, b {ddp.module.b.grad.item():.2f}")

# %% [markdown]
# 0.75 is right: three ranks had a gradient of 1, and rank 3's counts as 0. How does a wrapper know that a parameter is
# unused? Once backward is over, every gradient that is still missing belongs to an unused parameter, so yours will find
# out then. DDP wants to know earlier. By default, it expects every gradient. With `find_unused_parameters=True`, it
# searches the graph for unused parameters after each forward.

# %% [markdown]
# ## A call that nobody can forget
#
# So far, every training loop had to call `finish_gradient_sync()` before the step. What happens if one forgets it? The
# next cell trains a single weight for ten steps without that call. Each rank fits its own target, `rank`, so together
# they should approach the mean, 1.5. Compare the weights of the four ranks.


# %%
# %%ranks
def forgetful(wrapper):
    """Fit one weight, and never call finish_gradient_sync(). Returns the weight."""
    model = wrapper(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    for _ in range(10):
        optimizer.zero_grad()
        (model(torch.ones(1, 1)) - rank).square().sum().backward()
        optimizer.step()
    return model.module.weight.item()


weight = forgetful(HookedDDP)

# %% tags=["nbval-ignore-output"]
weights = [round(weight, 2) for weight in ranks.pull("weight")]
assert len(set(weights)) == 4
print("weights of ranks 0 to 3:", *weights)

# %% [markdown]
# There is no error. But these are four models, and each approaches its own target, slowly, because `pack` still divides
# every gradient by 4. `missing` was never reset after the first step, so no bucket was launched again.
#
# With torch's DDP and FSDP2, this cannot happen: they have no such call, because when `backward()` returns, the
# gradients are averaged. So autograd must have told them that backward has ended. A hook can ask for that:
# `queue_callback` takes a function, and autograd calls it when the running backward has computed all gradients.

# %%
# %%ranks 0
from torch.autograd import Variable

layer = nn.Linear(3, 2)


def report(parameter):
    print(f"gradient of shape {list(parameter.shape)}")
    if parameter is layer.bias:  # ask only once
        Variable._execution_engine.queue_callback(lambda: print("backward has ended"))


for parameter in layer.parameters():
    parameter.register_post_accumulate_grad_hook(report)
layer(torch.ones(1, 3)).sum().backward()
print("backward() has returned")

# %% [markdown]
# The engine's name begins with an underscore, so torch may change it. But torch's own wrappers need it, too: FSDP2
# makes this very call, and DDP makes it in C++.
#
# With `queue_callback`, our wrapper needs four more lines. In each backward, the first gradient asks for
# `finish_gradient_sync` at the end:


# %%
# %%ranks
from torch.autograd import Variable


class FinishingDDP(HookedDDP):
    """Waits for its buckets when backward ends."""

    def on_gradient(self, bucket, index, parameter):
        is_first = all(bucket.missing == len(bucket.parameters) for bucket in self.buckets)
        if self.enabled and is_first:
            Variable._execution_engine.queue_callback(self.finish_gradient_sync)
        super().on_gradient(bucket, index, parameter)


weight = forgetful(FinishingDDP)
print(f"weight {weight:.2f}")

# %% [markdown]
# Now the same training loop gives the same weight on every rank, the mean of the targets.
#
# One case remains. A rank that has run out of batches, or whose batch uses no trained parameter, has no hook that asks
# for anything, while the other ranks wait for its buckets. So if that can happen, all ranks call
# `finish_gradient_sync()` once in every step, after backward. In the lab, it does nothing where backward has done
# everything.

# %% [markdown]
# ## Communicating for the last micro-batch only
#
# When you accumulate gradients over micro-batches, only their sum has to be averaged. But hooks fire in every backward.
# So torch's DDP has a context manager, **`no_sync()`**. Inside it, backward accumulates gradients without
# communication. Forward must be inside it, too.
#
# **Predict.** You accumulate four micro-batches, the first three of them inside `no_sync()`. How many bytes does DDP
# all-reduce, as a multiple of the bytes of the gradients? 1 would mean that it all-reduces each gradient once.

# %%
my_prediction = None

# %%
# %%ranks
import contextlib

from shared import wire


def accumulated(model, without_sync):
    """Accumulate four micro-batches. Returns the bytes that are all-reduced, in multiples of the gradients."""
    with wire.ledger() as log:
        for index in range(4):
            context = model.no_sync() if index < without_sync else contextlib.nullcontext()
            with context:
                model(*sample).backward()
    return log.payload_bytes / gradients_bytes


ddp = DistributedDataParallel(new_model(), bucket_cap_mb=2.0, gradient_as_bucket_view=True)
for _ in range(3):
    ddp(*sample).backward()  # DDP rearranges its buckets after the first step
print(f"without no_sync() {accumulated(ddp, 0):.0f} ×, with it {accumulated(ddp, 3):.0f} ×")

# %% [markdown] tags=["open"]
# For `HookedDDP`, `no_sync()` only has to change a flag:


# %%
# %%ranks
@contextlib.contextmanager
def no_sync(self):
    self.enabled = False
    yield
    self.enabled = True


HookedDDP.no_sync = no_sync
print(f"HookedDDP with no_sync(): {accumulated(hooked, 3):.0f} ×")
hooked.finish_gradient_sync()

# %% [markdown]
# This short version has two bugs. If you nest it, communication is enabled again when the inner block ends. And if a
# micro-batch raises an exception that you catch outside the `with`, the flag stays False. Then the next
# `finish_gradient_sync()` fails, because no bucket was launched.

# %% [markdown]
# ## What communication costs
#
# We can measure what communication costs even without a timeline: how much longer is a step than the same step inside
# `no_sync()`? The difference contains the exposed time, the work of hooks and copies, and the time that backward loses
# because sending uses the same cores.
#
# The **communication-to-compute ratio** is the time of all all-reduces, hidden or exposed, divided by the time of the
# step without communication. Overlap does not change it. What overlap changes is the exposed part, in the table's last
# column. `BucketedDDP` hides nothing, so its last column is the whole ratio.
#
# The next cells compare our wrappers and torch's DDP with the same cap. In the table, compare "exposed" with "longer
# by".

# %%
# %%ranks --timeout 120
steps = {
    "no communication": measure.training_step(hooked, *sample, sync=False),
    "BucketedDDP": measure.training_step(bucketed, *sample),
    "HookedDDP": measure.training_step(hooked, *sample),
    "torch's DDP": measure.training_step(ddp, *sample),
}
times = measure.jobs(steps, rounds=10)
models = {"BucketedDDP": bucketed, "HookedDDP": hooked, "torch's DDP": ddp}
recorded = {name: recorded_step(model)[0] for name, model in models.items()}

# %% tags=["nbval-ignore-output"]
times, recorded = ranks.pull("times")[0], ranks.pull("recorded")[0]
alone, first, rows = times["no communication"], {}, []
for name, line in recorded.items():
    spans = [span for span in line.spans if span.lane == "communication"]
    first[name] = spans[0].payload_bytes / 1e6, 1e3 * (spans[0].began_s - line.began_s)
    longer = times.ratio(name, "no communication") - 1  # compared round by round
    launches = [f"{len(spans)}", "{:.1f} MB after {:.0f} ms".format(*first[name])]
    shown = [f"{line.exposed_ms:.0f}", f"{longer * alone.time_ms:.0f}"]
    rows.append([name, *launches, *shown, f"{line.exposed_ms / alone.time_ms:.0%}"])
exposed_ms = {name: line.exposed_ms for name, line in recorded.items()}
assert first["HookedDDP"] < first["torch's DDP"]  # by the bytes of their first bucket
overlapped_ms = max(exposed_ms["HookedDDP"], exposed_ms["torch's DDP"])
measure.expect(overlapped_ms < exposed_ms["BucketedDDP"], "overlap hides communication")
backward_ms = [times[name].phase_ms()["backward"] for name in ("no communication", "HookedDDP")]
print("backward of HookedDDP: {:.0f} ms in no_sync(), {:.0f} ms outside".format(*backward_ms))
header = ["", "all-reduces", "first launch", "exposed, ms", "longer by, ms", "exposed / compute"]
note = f"Launches and exposed time: rank 0. A step without communication: {alone.time_ms:.0f} ms."
tables.Table(header, rows, note)

# %% [markdown]
# Overlap is not free. For `BucketedDDP`, "longer by" exceeds "exposed" by the copies after backward. `HookedDDP` copies
# and launches during backward instead, while gloo sends on the same cores. So its backward takes longer, as its two
# times above the table show.
#
# Both wrappers that overlap expose less than `BucketedDDP`. As "first launch" shows, DDP's first bucket is larger than
# ours, for two reasons. Ours holds at most 1 MB, while the `bucket_cap_mb` that you set also applies to DDP's first
# bucket. And DDP closes a bucket only when it has reached the cap, while ours stay below it (chapter 03). A larger
# first bucket needs more of backward until it is full, and all others queue behind it. But fewer buckets reduce
# latency. Which wrapper exposes less depends on the model and the link.
#
# Compare the bytes of "first launch", not its milliseconds. They count from the start of forward, in one single step
# per row, and on shared cores one forward can take much longer than another.

# %% [markdown]
# ## The production version
#
# Does `FinishingDDP` train as well as torch's DDP? The next cell trains a smaller GPT, which does not sleep, for 150
# steps with each. Both now run in the same loop.


# %%
# %%ranks --timeout 180
def trained(wrapper, steps=150):
    """Train a small GPT. Returns the loss of each step, averaged over the ranks."""
    model = wrapper(TinyGPT(GPTConfig(vocab_size=text.vocab_size)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches, losses = torch.Generator().manual_seed(rank), torch.zeros(steps)
    for step in range(steps):
        starts = torch.randint(len(text.tokens) - 65, (8,), generator=batches)
        optimizer.zero_grad()
        loss = model(*text.windows(starts, length=64))
        loss.backward()
        optimizer.step()
        losses[step] = loss.detach()
    dist.all_reduce(losses)
    return (losses / world_size).tolist()


losses = {"FinishingDDP": trained(FinishingDDP), "torch's DDP": trained(DistributedDataParallel)}

# %% tags=["nbval-ignore-output"]
losses = ranks.pull("losses")[0]
ours, torchs = losses.values()
largest = max(abs(a - b) for a, b in zip(ours, torchs, strict=True))
assert largest < 0.05 and max(ours[-10:]) < 0.7 * ours[0]
print(f"The loss falls from {ours[0]:.1f} to {ours[-1]:.1f}. Largest difference: {largest:.0e}")

# %% [markdown]
# They do the same. Our design is that of torch's DDP (Li et al., VLDB 2020, §3.2.3 and §4). DDP does this in C++, and
# has more options:
#
# | option | what it does |
# |---|---|
# | `find_unused_parameters=True` | searches the graph after each forward, and all-reduces a "used" flag per parameter |
# | `static_graph=True` | assumes the same graph in each step (a **static graph**); finds unused parameters in step 1 |
# | `register_comm_hook` | replaces each all-reduce with a **communication hook**, such as one that sends bfloat16 |
# | `forward_sync_buffers` (was `broadcast_buffers`) | on by default: rank 0 broadcasts buffers before each forward |
# | `join()` | lets ranks process unequal numbers of batches: a finished rank takes part with zeros |

# %% [markdown]
# ## A trace of the step
#
# [On a real cluster](../docs/cluster.md), traces answer most of this lesson's questions. The next cell saves the
# timelines of `HookedDDP` as a trace. Open it in ui.perfetto.dev, and find the seven all-reduces of rank 0.
#
# In a trace of `torch.profiler` from a GPU, look for the same picture: NCCL has a row of its own, with kernels named
# `ncclDevKernel_AllReduce…`. Where kernels of backward run above one of them, it is hidden. Where the row of the
# computation is empty, it is exposed.

# %%
from pathlib import Path

from shared.timeline import trace

folder = Path(plots.__file__).parents[2] / "build"
folder.mkdir(exist_ok=True)
print(f"build/{trace.save(after, folder / 'overlap.json').name}")

# %% [markdown]
# ## A bug that gloo hides
#
# The collectives of this lesson ran on the CPU, where gloo's own threads write the results into your tensors. NCCL's
# asynchronous collectives run on a *stream* (a queue of GPU operations) of their own. Your other operations are queued
# in the *current stream*. `launch()` only queues the collective, and `wait()` does not block your program: it makes the
# current stream wait for the collective.
#
# In this cell, the call to `wait()` is missing. The `sleep` stands for the rest of backward. `detect_mismatch=False`
# switches off mismatch detection, so that only the collective itself runs.

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
# gloo passes. On a GPU, the division may run before the all-reduce, and the optimizer would then take a step with wrong
# gradients.
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
# The simulation also raises an error if you change or free a tensor that a collective still uses.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## Recap
#
# There are Ψ parameters in fp32, with S = 4Ψ bytes of gradients, and N ranks. The optimizer is Adam, so a rank holds
# 16Ψ bytes: 4Ψ of parameters, 4Ψ of gradients and 8Ψ of optimizer state. With each wrapper, a rank sends 2(N−1)/N · S
# bytes per step.
#
# | | memory per rank | all-reduces | launched |
# |---|---|---|---|
# | `BucketedDDP` | 16Ψ; 20Ψ at the end of backward: gradients and buckets | one per bucket | after backward |
# | per parameter, blocking | 16Ψ | one per parameter | during backward, blocking it |
# | per parameter, asynchronous | 16Ψ | one per parameter | during backward |
# | `HookedDDP`, torch's DDP¹ | 16Ψ: each gradient moves into its bucket at once | one per bucket | during backward |
#
# ¹ With `gradient_as_bucket_view=True`. Otherwise, DDP holds buckets of 4Ψ bytes besides the gradients.
#
# The exposed time is max(0, e_last − end of backward), with eᵢ = max(eᵢ₋₁, fullᵢ) + tᵢ.
#
# **Terms**
#
# - **exposed communication**: the time during which a collective is in flight and the rank has nothing to compute.
# - **hidden communication**: the time during which a collective is in flight while the rank computes.
# - **hook**: a function that you register and that autograd calls, for instance when a gradient is ready.
# - **`no_sync()`**: a context manager inside which a wrapper accumulates gradients without communication.
# - **communication-to-compute ratio**: the time of all collectives of a step, hidden or exposed, over the time of the
#   same step without communication.
# - **static graph**: an autograd graph that is the same in every step. DDP's `static_graph=True` relies on it.
# - **communication hook**: a function that replaces the all-reduce of each bucket in torch's DDP.
#
# ## Further reading
#
# - [On a real cluster](../docs/cluster.md): how to see overlap, buckets and their order there.
# - Li et al., *PyTorch Distributed: Experiences on Accelerating Data Parallel Training*, VLDB 2020 (arXiv 2006.15704):
#   §3.2.3 on overlap and the order of buckets, and the evaluation of bucket sizes on NCCL and gloo.
# - *Distributed Data Parallel*, a design note (docs.pytorch.org/docs/stable/notes/ddp.html): what DDP does when it is
#   built, in forward and in backward.
# - *The Ultra-Scale Playbook*, Hugging Face, section "Data Parallelism": overlap, bucketing and accumulation as three
#   optimizations, with profiles.
# - *Introduction to Holistic Trace Analysis*, PyTorch tutorials: idle time and overlap, from traces of many ranks.

# %% [markdown] slideshow={"slide_type": "slide"}
# ## What is still wasted
#
# Communication is now hidden where it can be, and no all-reduce could send fewer bytes (chapter 01). But each step on
# four ranks still takes longer than a step without communication. How much longer will it be on 8, 64 or 512 ranks?
# Chapter 05 measures it on your ranks, and computes it for more.
#
# But first, in the lab, you build `OverlappedDDP`.

# %%
ranks.stop()
