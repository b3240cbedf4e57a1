# ---
# jupyter:
#   course:
#     module: scaling
#     minutes: 75
# ---

# %% [markdown]
# # Lab 05 · Scaling
#
# **75 minutes, 13 points.** You write a cost model of data parallelism in five small functions: it fits α and β to
# measured times, predicts a training step, finds the best bucket cap, and predicts how efficient 8, 64 or 512 ranks
# would be. Then you measure what communication costs with chapter 04's wrapper, and compare the results with your
# predictions.
#
# The functions of the cost model only calculate, so you do not need `dist` in exercises 5.1 to 5.4. The checks try
# sizes and numbers of ranks that you do not see. So N is always the parameter `ranks`, which may differ from the number
# of ranks that run. The ranks use the CPU, because the last part needs a link of a known rate.

# %% tags=["nbval-ignore-output"]
from shared import measure, ranks, tables
from shared.checks import scaling as check
from shared.plots import scaling as scaling_plots
from shared.predictions import predicted

ranks.start(world_size=4, backend="gloo:cpu")

# %% tags=["export"]
# %%ranks
"""A cost model of a step of data parallelism, and the measurement that tests it."""

import statistics
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from shared.formulas import ring_all_reduce_s

# %% [markdown]
# ## Exercise 5.1 · Fit α and β (15 min, 2 points)
#
# On N ranks, a ring all-reduce of S bytes has 2(N−1) steps. In each of them, a rank sends S/N bytes, which takes α +
# β·S/N seconds. So the time of the all-reduce is
#
# $$t(S) = 2(N-1)\,\alpha + \frac{2(N-1)}{N}\,S\,\beta$$
#
# You have measured t for several sizes, and want α and β. Minimize the sum of the squares of the *relative* errors,
# $\sum_S (t(S) / \text{measured}(S) - 1)^2$. Then an all-reduce of 1 KB counts as much as one of 10 MB. If you
# minimized the absolute errors, almost only the largest size would matter, and α could take almost any value.
#
# If you divide the formula by the measured time, each size gives one equation $u\,\alpha + v\,\beta \approx 1$ with two
# known numbers u and v. So this is a linear least-squares problem: find the α and β with the smallest
# $\sum (u\,\alpha + v\,\beta - 1)^2$. Solve it with `torch.linalg.lstsq`, or on paper.
#
# - `times_s` contains the measured seconds by size in bytes. There are at least two sizes. `ranks` is N.
# - Return α in seconds and β in seconds per byte.
# - Calculate with Python's floats or in `float64`. The precision of `float32` is too low for these sums.
#
# The first check uses times without noise, so an exact fit is possible. The second one adds noise.
#
# <details><summary>Hint</summary>
#
# What are u and v for one size and its measured time? For `lstsq(A, B)`, they are one row of A. What is B?
# </details>
#
# <details><summary>Another hint, if you solve it on paper</summary>
#
# The sum is smallest where both of its derivatives are 0. These are two linear equations with two unknowns. How many
# sums over the sizes do they contain?
# </details>


# %% tags=["exercise", "export"] grade_id="fit-alpha-beta"
# %%ranks
def fit_alpha_beta(times_s: dict[int, float], ranks: int) -> tuple[float, float]:
    """Fit α and β to the times of ring all-reduces, by least squares of the relative error.

    Args:
        times_s: The measured seconds of an all-reduce, by the size of its tensor in bytes.
        ranks: How many ranks took part.

    Returns:
        alpha_s and beta_s, in seconds per step and in seconds per byte.
    """
    ### BEGIN SOLUTION
    steps = 2 * (ranks - 1)
    u = [steps / time_s for time_s in times_s.values()]
    v = [steps / ranks * size / time_s for size, time_s in times_s.items()]
    uu, vv = sum(x * x for x in u), sum(x * x for x in v)
    uv = sum(x * y for x, y in zip(u, v, strict=True))
    determinant = uu * vv - uv * uv
    alpha_s = (sum(u) * vv - sum(v) * uv) / determinant
    beta_s = (sum(v) * uu - sum(u) * uv) / determinant
    return alpha_s, beta_s
    ### END SOLUTION


# %% [markdown]
# Try it on two sizes without noise. It should print 100 µs and 8 ns:

# %%
# %%ranks 0
alpha_s, beta_s = fit_alpha_beta({1_000: 0.000612, 1_000_000: 0.0126}, ranks=4)
print(f"α = {1e6 * alpha_s:.0f} µs, β = {1e9 * beta_s:.0f} ns per byte")

# %% tags=["check"] grade_id="check-fit-alpha-beta" points=2
check.fit_alpha_beta()

# %% [markdown]
# ## Exercise 5.2 · Predict a step (10 min, 2 points)
#
# A rank computes for `compute_s` seconds: forward, then backward. During backward, its buckets become ready one after
# another. If the all-reduce of bucket i takes $t_i$, chapter 04's formula says that it completes at
#
# $$e_i = \max(e_{i-1},\ \text{ready}_i) + t_i$$
#
# `predict_step_s` returns how long the whole step takes, without the optimizer.
#
# - `buckets` contains `(ready_s, size_bytes)` of each bucket, in launch order. `ready_s` counts from the start of the
#   step. It need not increase from bucket to bucket, because the launch order is fixed.
# - `ring_all_reduce_s(size_bytes, ranks, alpha_s, beta_s)` (imported above) returns $t_i$. On one rank it is 0.
# - A step is over when backward is over *and* the last all-reduce is complete.
#
# The check begins with a single bucket.
#
# <details><summary>Hint</summary>
#
# One variable is enough: the time at which the link is free again. What is it before the first bucket?
# </details>
#
# <details><summary>Another hint</summary>
#
# What does your function return if every bucket is complete long before backward ends?
# </details>


# %% tags=["exercise", "export"] grade_id="predict-step"
# %%ranks
def predict_step_s(
    buckets: list[tuple[float, int]], compute_s: float, ranks: int, alpha_s: float, beta_s: float
) -> float:
    """Predict the time of a step whose buckets are all-reduced one after another, during backward.

    Args:
        buckets: (ready_s, size_bytes) of each bucket, in launch order.
        compute_s: When backward ends, in seconds since the start of the step.
    """
    ### BEGIN SOLUTION
    free_s = 0.0  # when the link is free again
    for ready_s, size_bytes in buckets:
        free_s = max(free_s, ready_s) + ring_all_reduce_s(size_bytes, ranks, alpha_s, beta_s)
    return max(compute_s, free_s)
    ### END SOLUTION


# %% [markdown]
# Try it on two buckets of 1 MB, whose all-reduces take 12.6 ms each. The first one is ready at 10 ms, the second at 20
# ms, and backward ends at 25 ms. It should print 35.2 ms:

# %%
# %%ranks 0
step_s = predict_step_s([(0.010, 1_000_000), (0.020, 1_000_000)], 0.025, 4, 1e-4, 8e-9)
print(f"{1e3 * step_s:.1f} ms")

# %% tags=["check"] grade_id="check-predict-step" points=2
check.predict_step_s()

# %% [markdown]
# ## Exercise 5.3 · The best bucket cap (15 min, 3 points)
#
# The cap determines how many buckets there are, and when they are ready. `buckets_of` packs gradients into buckets:
#
# - `gradients` contains `(ready_s, size_bytes)` of each gradient, in the order in which backward completes them. So
#   here, `ready_s` never decreases.
# - A bucket takes gradients in this order. If the next one would make it larger than `cap_bytes`, that gradient starts
#   a new bucket. A gradient that is larger than the cap gets a bucket of its own.
# - A bucket is ready when all of its gradients are ready. Return `(ready_s, size_bytes)` of each bucket, in order.
# - Do not change the list `gradients`, because `best_cap_bytes` will need it again for the next cap.
#
# In chapter 03, the first bucket had a smaller cap. The cost model uses one cap for all buckets.
#
# <details><summary>Hint</summary>
#
# To which existing bucket may the next gradient still be added?
# </details>


# %% tags=["exercise", "export"] grade_id="buckets-of"
# %%ranks
def buckets_of(gradients: list[tuple[float, int]], cap_bytes: int) -> list[tuple[float, int]]:
    """Pack gradients into buckets of at most cap_bytes, in order.

    Args:
        gradients: (ready_s, size_bytes) of each gradient, in the order in which they are ready.

    Returns:
        (ready_s, size_bytes) of each bucket.
    """
    ### BEGIN SOLUTION
    buckets = []
    for ready_s, size_bytes in gradients:
        if buckets and buckets[-1][1] + size_bytes <= cap_bytes:
            size_bytes += buckets.pop()[1]
        buckets.append((ready_s, size_bytes))
    return buckets
    ### END SOLUTION


# %% [markdown]
# Try it on four gradients with a cap of 8 bytes. It should print `[(2.0, 8), (3.0, 9), (4.0, 1)]`:

# %%
# %%ranks 0
print(buckets_of([(1.0, 4), (2.0, 4), (3.0, 9), (4.0, 1)], 8))

# %% tags=["check"] grade_id="check-buckets-of" points=1
check.buckets_of()

# %% [markdown]
# `best_cap_bytes` returns the cap with which the predicted step is shortest. Call `buckets_of` and `predict_step_s`.
#
# - `caps_bytes` lists the caps to try, in any order.
# - If two caps give the same predicted time, return either of them.
#
# <details><summary>Hint</summary>
#
# Python's `min` takes a `key`. What should the key of a cap be?
# </details>


# %% tags=["exercise", "export"] grade_id="best-cap"
# %%ranks
def best_cap_bytes(
    gradients: list[tuple[float, int]],
    caps_bytes: list[int],
    compute_s: float,
    ranks: int,
    alpha_s: float,
    beta_s: float,
) -> int:
    """Return the cap with which the predicted step is shortest.

    Args:
        gradients: (ready_s, size_bytes) of each gradient, in the order in which they are ready.
        caps_bytes: The caps to try.
        compute_s: When backward ends, in seconds since the start of the step.
    """

    ### BEGIN SOLUTION
    def step_s(cap_bytes: int) -> float:
        return predict_step_s(buckets_of(gradients, cap_bytes), compute_s, ranks, alpha_s, beta_s)

    return min(caps_bytes, key=step_s)
    ### END SOLUTION


# %% tags=["check"] grade_id="check-best-cap" points=2
check.best_cap_bytes()

# %% [markdown]
# ## Exercise 5.4 · Predict the efficiency (10 min, 3 points)
#
# As in the lesson, the efficiency is the number of samples per second on N ranks, divided by N times the number of
# samples per second on one rank. One rank sends nothing, so its step takes $T_1$ = `compute_s`.
#
# - `kind="weak"`: every rank computes as much as one rank alone. The efficiency is $T_1 / T_N$.
# - `kind="strong"`: N ranks share the batch of one rank. Each computes for 1/N of the time, and its gradients are ready
#   after 1/N of the time. It sends as many bytes as in weak scaling. The efficiency is $T_1 / (N \cdot T_N)$.
#
# In both cases, use `buckets_of` and `predict_step_s` to predict $T_N$. Here, too, do not change the list `gradients`.
#
# <details><summary>Hint</summary>
#
# Only `compute_s` and the times in `gradients` depend on the kind. What do you multiply them by in each case?
# </details>


# %% tags=["exercise", "export"] grade_id="efficiency"
# %%ranks
def efficiency(
    gradients: list[tuple[float, int]],
    compute_s: float,
    cap_bytes: int,
    ranks: int,
    alpha_s: float,
    beta_s: float,
    kind: str = "weak",
) -> float:
    """Predict the efficiency of data parallelism on several ranks.

    Args:
        gradients: (ready_s, size_bytes) of each gradient, in a step of one rank.
        compute_s: When backward ends, in a step of one rank.
        kind: "weak", if every rank has a batch of its own, or "strong", if they share one.
    """
    ### BEGIN SOLUTION
    share = 1 / ranks if kind == "strong" else 1.0
    ready = [(share * ready_s, size_bytes) for ready_s, size_bytes in gradients]
    buckets = buckets_of(ready, cap_bytes)
    step_s = predict_step_s(buckets, share * compute_s, ranks, alpha_s, beta_s)
    return share * compute_s / step_s
    ### END SOLUTION


# %% [markdown]
# Try it on a step of 20 ms with a single gradient of 1 MB, which is ready at its end. Four ranks should reach 61% in
# weak scaling, and 28% in strong scaling:

# %%
# %%ranks 0
for kind in ("weak", "strong"):
    print(f"{kind} {efficiency([(0.020, 1_000_000)], 0.020, 2**20, 4, 1e-4, 8e-9, kind):.0%}")

# %% tags=["check"] grade_id="check-efficiency" points=3
check.efficiency()

# %% [markdown]
# ## Exercise 5.5 · What communication really costs (15 min, 3 points)
#
# Now you need a measurement to compare your predictions with.
#
# The time of an all-reduce says little, because it may be hidden behind backward. What counts is how much *longer* a
# step takes because of communication. `communication_cost(model, loss_of, now_ms, rounds=10)` measures steps with and
# without communication, and returns two numbers:
#
# ```python
# compute_ms = median(time of forward, backward and finish, inside no_sync)
# exposed_ms = median(time of the same, outside) - compute_ms
# ```
#
# We use medians because a single slow round hardly changes them. The median of the rounds' differences is an equally
# good `exposed_ms`. As in chapter 04, the difference also contains the work of hooks and copies, and the time that
# backward loses because sending uses the same cores.
#
# - Alternate between the two kinds of step. In each round, the step inside `no_sync()` comes first.
# - Measure `rounds` rounds, after one additional warm-up round, which does not count.
# - Each measurement starts on all ranks at once: call `dist.barrier()` before you read the clock.
# - All gradients are None when a measurement starts. The model that you get may already have some.
# - `loss_of(model)` runs forward and returns the loss. `now_ms()` reads the clock in milliseconds. On a GPU, it first
#   waits until the GPU has finished.
# - Read the clock right before forward and right after `finish_gradient_sync()`, in both kinds of step.
# - If noise makes the difference negative, return it as it is. Returning 0 would hide how large the noise is.
#
# <details><summary>Hint</summary>
#
# Both kinds of step consist of the same lines. Which of these lines can become a function that you call once inside
# `no_sync()` and once outside?
# </details>


# %% tags=["exercise", "export"] grade_id="communication-cost"
# %%ranks
def communication_cost(
    model: nn.Module, loss_of: Callable, now_ms: Callable[[], float], rounds: int = 10
) -> tuple[float, float]:
    """Measure how long a step computes, and how much longer it takes because of communication.

    Args:
        model: A wrapper with finish_gradient_sync() and no_sync().
        loss_of: Runs forward and returns the loss: loss_of(model).
        now_ms: Reads the clock, in milliseconds.
        rounds: How many rounds count, after one more round that warms up.

    Returns:
        compute_ms, the median time of a step without communication, and exposed_ms, by how much the median step with
        communication is longer.
    """

    ### BEGIN SOLUTION
    def step_ms() -> float:
        model.zero_grad(set_to_none=True)
        dist.barrier()
        began_ms = now_ms()
        loss_of(model).backward()
        model.finish_gradient_sync()
        return now_ms() - began_ms

    without_sync_ms, with_sync_ms = [], []
    for _ in range(rounds + 1):
        with model.no_sync():
            without_sync_ms.append(step_ms())
        with_sync_ms.append(step_ms())
    compute_ms = statistics.median(without_sync_ms[1:])  # the first round warms up
    exposed_ms = statistics.median(with_sync_ms[1:]) - compute_ms
    return compute_ms, exposed_ms
    ### END SOLUTION


# %% tags=["check"] grade_id="check-communication-cost" points=3
check.communication_cost()

# %% [markdown]
# ## Your predictions and your measurements (10 min)
#
# Now compare your predictions with a real wrapper, `OverlappedDDP`. It trains a GPT with 2.7 million parameters behind
# a link of 1 Gbit/s. A real link would need new processes for the ranks, without the functions that you have defined,
# so the link is *emulated*. As a stand-in for a GPU, each block of the GPT also sleeps for 8 ms in forward and 16 ms in
# backward. Mismatch detection is switched off, because it takes time.

# %%
# %%ranks
from shared import measure
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu
from shared.wire import mismatch
from solutions.overlapped_ddp import OverlappedDDP

mismatch.ignore()
link = measure.behind_link("1gbit", latency_ms=0.1)

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
inputs, targets = (tensor.to(device) for tensor in text.windows([1000 * rank], length=16))


def new_model():
    model = TinyGPT(config).to(device)
    stand_in_for_gpu(model.blocks, forward_ms=8, backward_ms=16)
    return model


# %% [markdown]
# First, fit α and β. If β is far from 8 ns per byte, check that your solution to exercise 5.1 passes.

# %%
# %%ranks
sizes_bytes = (400, 40_000, 1_000_000, 4_000_000, 10_000_000)
sums = measure.collectives({"all-reduce": dist.all_reduce}, sizes_bytes, rounds=5)
times_s = {size: times.time_s for size, times in sums["all-reduce"].items()}
alpha_s, beta_s = fit_alpha_beta(times_s, world_size)

# %% tags=["nbval-ignore-output"]
alpha_s, beta_s = ranks.pull("alpha_s")[0], ranks.pull("beta_s")[0]
print(f"α = {1e6 * alpha_s:.0f} µs per step, β = {1e9 * beta_s:.2f} ns per byte")
measure.expect(4e-9 < beta_s < 16e-9, "β is near the 8 ns per byte of 1 Gbit/s")

# %% [markdown]
# Your α is larger than the link's 0.1 ms, because it also contains gloo's own work in each step. gloo overlaps some of
# that work with sending. The formula does not know that, so β comes out a little low.
#
# Next, find out when each gradient is ready. We keep these times as fractions of the computation.
# `measure.ready_fractions` runs steps inside `no_sync()`, where communication cannot delay any gradient, and returns
# `(fraction, size_bytes)` of each. A gradient counts as ready when it is ready on *all* ranks.

# %%
# %%ranks
overlapped = OverlappedDDP(new_model(), bucket_cap_mb=2.0)
fractions = measure.ready_fractions(overlapped, inputs, targets, rounds=9)

# %% [markdown]
# Then measure `OverlappedDDP` with two caps, and torch's DDP. With communication, all ranks finish together, because
# each waits for the slowest. On a faster rank, the difference would also contain this waiting. So we keep the costs of
# the rank that computes longest:


# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel


class TorchDDP(DistributedDataParallel):
    def finish_gradient_sync(self):
        """Do nothing: backward() has waited for all buckets, as with OverlappedDDP."""


def loss_of(model):
    return model(inputs, targets)


def now_ms():
    return 1e3 * measure.now_s()


models = {
    "OverlappedDDP, 2 MB": overlapped,
    "OverlappedDDP, 25 MB": OverlappedDDP(new_model(), bucket_cap_mb=25.0),
    "torch's DDP, 2 MB": TorchDDP(new_model(), bucket_cap_mb=2.0, gradient_as_bucket_view=True),
}
costs = {
    name: communication_cost(model, loss_of, now_ms, rounds=5) for name, model in models.items()
}
of_ranks = [None] * world_size
dist.all_gather_object(of_ranks, costs)
costs = {name: max(of_rank[name] for of_rank in of_ranks) for name in models}

# %% [markdown]
# **Predict.** How many milliseconds does communication add to a step with a cap of 25 MB? The link needs about 130 ms
# for all gradients.

# %%
my_prediction_ms = None

# %%
# %%ranks
compute_s = costs["OverlappedDDP, 2 MB"][0] / 1e3
gradients = [(fraction * compute_s, size_bytes) for fraction, size_bytes in fractions]
predicted_ms = {}
for name in models:
    cap_bytes = (25 if "25" in name else 2) * 2**20
    step_s = predict_step_s(
        buckets_of(gradients, cap_bytes), compute_s, world_size, alpha_s, beta_s
    )
    predicted_ms[name] = 1e3 * (step_s - compute_s)

# %% tags=["nbval-ignore-output"]
rows, predicted_ms = [], ranks.pull("predicted_ms")[0]
measured_ms = {name: exposed_ms for name, (_, exposed_ms) in ranks.pull("costs")[0].items()}
for name, ms in predicted_ms.items():
    rows.append([name, f"{ms:.0f}", f"{measured_ms[name]:.0f}"])
exposed_ms = measured_ms["OverlappedDDP, 25 MB"]
print(f"25 MB: {predicted(my_prediction_ms, '{} ms')}measured {exposed_ms:.0f} ms")
for exposed_ms in (predicted_ms, measured_ms):
    shorter = exposed_ms["OverlappedDDP, 2 MB"] < exposed_ms["OverlappedDDP, 25 MB"]
    measure.expect(shorter, "a cap of 2 MB exposes less than one of 25 MB")
tables.Table(["", "exposed, predicted, ms", "exposed, measured, ms"], rows)

# %% [markdown]
# With a cap of 25 MB, there are only two buckets here: the small first one, and one for all other gradients. The second
# one is ready only when backward is over, so there is nothing left to hide it behind. Your cost model can predict this
# without measuring a step with that cap. With a cap of 2 MB, both the prediction and the measurement may change by 20
# ms from run to run.
#
# The cost model assumes that sending needs no core, and does not know about the small first bucket.
#
# Finally, use your cost model for ranks that you do not have. The next cells predict the best cap for 2 to 512 ranks
# behind this link. In the figure, compare the marks, which you have measured on four ranks, with the lines of the same
# cap, and follow these lines to the right.

# %%
# %%ranks
caps_mb = [0.25, 0.5, 1, 2, 4, 8, 16]
caps_bytes = [int(cap_mb * 2**20) for cap_mb in caps_mb]
best = {
    n: best_cap_bytes(gradients, caps_bytes, compute_s, n, alpha_s, beta_s) for n in (2, 8, 64, 512)
}
reached = {n: efficiency(gradients, compute_s, cap, n, alpha_s, beta_s) for n, cap in best.items()}


def curve(cap_mb):
    """Predict the efficiency of weak scaling with a cap, on 2 to 512 ranks."""
    cap_bytes = int(cap_mb * 2**20)
    return {
        2**n: efficiency(gradients, compute_s, cap_bytes, 2**n, alpha_s, beta_s)
        for n in range(1, 10)
    }


curves = {f"{cap_mb:g} MB": curve(cap_mb) for cap_mb in (0.25, 2, 25)}

# %% tags=["nbval-ignore-output"]
best, reached = ranks.pull("best")[0], ranks.pull("reached")[0]
rows = [[f"{n}", f"{cap / 2**20:g}", f"{reached[n]:.0%}"] for n, cap in best.items()]
measure.expect(best[2] < best[512], "more ranks need a larger cap")
measure.expect(reached[512] < reached[2], "more ranks are less efficient")
display(tables.Table(["ranks", "best cap, MB", "efficiency, weak scaling"], rows))
steps_ms = {name.removeprefix("OverlappedDDP, "): ms for name, ms in ranks.pull("costs")[0].items()}
marks = {cap: {4: steps_ms[cap][0] / sum(steps_ms[cap])} for cap in ("2 MB", "25 MB")}
scaling_plots.efficiencies(
    ranks.pull("curves")[0], marks, "weak scaling, emulated link of 1 Gbit/s"
)

# %% [markdown]
# With more ranks, each bucket costs more latency, so the best cap grows. All gradients together take 10.8 MB, so a cap
# of 16 MB means a single bucket, which is not hidden at all. Even with the best cap, the efficiency falls. And more
# ranks do not save memory: each of them still holds all parameters, all gradients and the full optimizer state. Chapter
# 06 counts those bytes.

# %%
ranks.stop()
