# ---
# jupyter:
#   course:
#     module: scaling
#     minutes: 75
# ---

# %% [markdown]
# # Lab 05 · Scaling
#
# **75 minutes, 10 points.** The lesson's T ≥ C/W knew nothing about latency. You put it in, and find out which models
# suffer from it. Then you predict weak and strong scaling on any number of ranks, choose how many micro-batches to
# accumulate, and measure what communication costs on a machine that is never quiet. At the end, a figure shows how well
# your own predictions fit your own measurements.
#
# The ranks run behind a *shaped* link of 1 Gbit/s, as in the lesson, so what you measure is real. Where the machine
# cannot shape links, they are emulated by the ring's formula. The figure at the end then only tests your bookkeeping.
#
# In exercises 5.1 to 5.3, you only calculate, without `dist`. The checks try sizes and numbers of ranks that you do not
# see. So N is always the parameter `ranks`, which may differ from the number of ranks that run.

# %% tags=["nbval-ignore-output"]
from shared import measure, ranks, tables
from shared.checks import scaling as check
from shared.plots import scaling as scaling_plots
from shared.predictions import predicted

measure.start_behind_link(world_size=4, rate="1gbit", latency_ms=0.1)

# %% tags=["export"]
# %%ranks
"""A cost model of a step of data parallelism, and the measurement that tests it."""

import math
import statistics
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from shared.formulas import ring_all_reduce_s

# %% [markdown]
# ## Exercise 5.1 · The inequality with latency (15 min, 2 points)
#
# In the lesson, the size of the model dropped out of the inequality, because an all-reduce had no latency. Now derive
# the inequality again with latency: how many tokens T does a backward need at least, so that it lasts as long as all
# its all-reduces together?
#
# - The model has `parameters` parameters. Backward takes 4 operations per parameter and token, and the GPU computes
#   `flops_per_s` operations per second.
# - A gradient has `bytes_each` bytes, 2 in bf16 and 4 in float32.
# - The gradients are in `buckets` buckets of equal size, which are all-reduced one after another. The all-reduce of a
#   bucket of S bytes lasts `ring_all_reduce_s(S, ranks, alpha_s, beta_s)` seconds (imported above), that is $2(N-1)\,
#   \alpha + \frac{2(N-1)}{N}\,S\,\beta$.
# - Return T, without rounding. On one rank, it is 0.
#
# Write both times on paper before you write code: T appears in only one of them.
#
# <details><summary>Hint</summary>
#
# How many bytes does one bucket have? How long does one all-reduce take, and how long do all of them?
# </details>
# <details><summary>Another hint</summary>
#
# How many seconds of backward does one token give? How often do these seconds fit into the time of all all-reduces?
# </details>


# %% tags=["exercise", "export"] grade_id="tokens-needed"
# %%ranks
def tokens_needed(
    parameters: float,
    flops_per_s: float,
    ranks: int,
    alpha_s: float,
    beta_s: float,
    buckets: int = 1,
    bytes_each: int = 2,
) -> float:
    """Return with how many tokens per rank a backward lasts as long as the all-reduces of its gradients.

    Args:
        parameters: The number of parameters of the model.
        flops_per_s: The operations that a rank computes per second.
        buckets: How many all-reduces there are. Their buckets have equal sizes.
        bytes_each: The bytes of the gradient of one parameter.
    """
    ### BEGIN SOLUTION
    backward_s_per_token = 4 * parameters / flops_per_s
    bucket_bytes = bytes_each * parameters / buckets
    all_reduces_s = buckets * ring_all_reduce_s(bucket_bytes, ranks, alpha_s, beta_s)
    return all_reduces_s / backward_s_per_token
    ### END SOLUTION


# %% [markdown]
# Try it on 64 hosts with one H100 each, which reaches 40% of its 989 TFLOP/s, behind adapters with 47 GB/s and α = 14
# µs. The lesson's C/W was 8,417 tokens. Which of the three models come near that with buckets of 25 MiB, and which with
# a single bucket?

# %%
# %%ranks 0
for parameters in (125e6, 1.3e9, 70e9):
    count = math.ceil(2 * parameters / (25 * 2**20))
    tokens = tokens_needed(parameters, 0.4 * 989e12, 64, 14e-6, 1 / 47e9, buckets=count)
    one_bucket = tokens_needed(parameters, 0.4 * 989e12, 64, 14e-6, 1 / 47e9)
    print(f"{parameters:8.1e} parameters: {tokens:,.0f} tokens, or {one_bucket:,.0f} in one bucket")

# %% [markdown]
# With buckets of 25 MiB, latency is a fixed surcharge on every byte, and all three models need about 22,000 tokens, 2.6
# times C/W. In one bucket, only the smallest model still notices the latency. But one bucket is full only when backward
# is over, and then nothing is left to hide it. So the best cap lies in between, and it grows with the number of ranks.

# %% tags=["check"] grade_id="check-tokens-needed" points=2
check.tokens_needed()

# %% [markdown]
# ## Given: the step of chapter 04
#
# The inequality treats all all-reduces as one. Chapter 04's recurrence, eᵢ = max(eᵢ₋₁, fullᵢ) + tᵢ, is more exact. You
# know it, so both functions are given. In the code, the `ready_s` of a bucket is its fullᵢ:
#
# - `buckets_of(gradients, cap_bytes)` packs gradients into buckets. `gradients` contains `(ready_s, size_bytes)` of
#   each, in the order in which backward completes them. A bucket is full when its last gradient is ready.
# - `predict_step_s(buckets, compute_s, ranks, alpha_s, beta_s)` returns how long a step takes whose backward ends after
#   `compute_s` seconds. On one rank, that is `compute_s`.


# %% tags=["export"]
# %%ranks
def buckets_of(gradients: list[tuple[float, int]], cap_bytes: int) -> list[tuple[float, int]]:
    """Pack gradients into buckets of at most cap_bytes, in order. Each is (ready_s, size_bytes), as its gradients are.

    A gradient that is larger than the cap gets a bucket of its own.
    """
    buckets = []
    for ready_s, size_bytes in gradients:
        if buckets and buckets[-1][1] + size_bytes <= cap_bytes:
            size_bytes += buckets.pop()[1]
        buckets.append((ready_s, size_bytes))
    return buckets


def predict_step_s(
    buckets: list[tuple[float, int]], compute_s: float, ranks: int, alpha_s: float, beta_s: float
) -> float:
    """Predict the time of a step whose buckets are all-reduced one after another, during backward.

    Args:
        buckets: (ready_s, size_bytes) of each bucket, in launch order.
        compute_s: When backward ends, in seconds since the start of the step.
    """
    free_s = 0.0  # when the link is free again
    for ready_s, size_bytes in buckets:
        free_s = max(free_s, ready_s) + ring_all_reduce_s(size_bytes, ranks, alpha_s, beta_s)
    return max(compute_s, free_s)


# %% [markdown]
# ## Exercise 5.2 · Predict the efficiency (15 min, 3 points)
#
# As in the lesson, the efficiency is the number of samples per second on N ranks, divided by N times the number of
# samples per second on one rank. One rank sends nothing, so its step takes $T_1$ = `compute_s`.
#
# - `kind="weak"`: every rank computes as much as one rank alone. The efficiency is $T_1 / T_N$.
# - `kind="strong"`: N ranks share the batch of one rank. Each computes for 1/N of the time, and its gradients are ready
#   after 1/N of the time. It sends as many bytes as in weak scaling. The efficiency is $T_1 / (N \cdot T_N)$.
#
# In both cases, use `buckets_of` and `predict_step_s` to predict $T_N$. Do not change the list `gradients`:
# the next call may get it, too.
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
# Try it on a step of 20 ms whose only gradient, of 1 MB, is ready at its end. Four ranks should reach 61% in weak
# scaling, and 28% in strong scaling:

# %%
# %%ranks 0
for kind in ("weak", "strong"):
    print(f"{kind} {efficiency([(0.020, 1_000_000)], 0.020, 2**20, 4, 1e-4, 8e-9, kind):.0%}")

# %% tags=["check"] grade_id="check-efficiency" points=3
check.efficiency()

# %% [markdown]
# ## Exercise 5.3 · How many micro-batches? (10 min, 2 points)
#
# Your GPU has no memory for a larger batch, and the ranks compute for only half of each step. So you accumulate
# gradients over m micro-batches (chapter 02). Each of them computes for `compute_s` seconds. Only the last one
# communicates, and it leaves `exposed_s` seconds exposed, whatever m is.
#
# - `micro_batches_needed(compute_s, exposed_s, target)` returns the smallest m with which the ranks compute for at
#   least the part `target` of the step, such as 0.8.
# - `target` is above 0 and below 1. m is an int and at least 1.
# - A measured `exposed_s` may be 0, or negative because of noise.
#
# <details><summary>Hint</summary>
#
# With m micro-batches, how long does a step take, and for how much of it do the ranks compute?
# </details>
# <details><summary>Another hint</summary>
#
# Solve for m. Must you round up, down, or to the nearest integer?
# </details>


# %% tags=["exercise", "export"] grade_id="micro-batches-needed"
# %%ranks
def micro_batches_needed(compute_s: float, exposed_s: float, target: float) -> int:
    """Return how many micro-batches a step must accumulate, so that ranks compute for a part `target` of it.

    Args:
        compute_s: How long a rank computes for one micro-batch.
        exposed_s: The exposed communication after the last one.
        target: Between 0 and 1, both excluded.
    """
    ### BEGIN SOLUTION
    # m · compute_s / (m · compute_s + exposed_s) ≥ target
    return max(1, math.ceil(target * exposed_s / ((1 - target) * compute_s)))
    ### END SOLUTION


# %% [markdown]
# Try it on micro-batches that compute for 100 ms and leave 100 ms exposed. For 50%, 80% and 90%, you need 1, 4 and 9.
# (The cell passes 99.9 ms: with exactly 100, a rounding error could cost one more micro-batch.)

# %%
# %%ranks 0
print([micro_batches_needed(0.1, 0.0999, target) for target in (0.5, 0.8, 0.9)])

# %% [markdown]
# Every micro-batch adds tokens to the global batch, so accumulation is not free either: beyond the critical batch size,
# you compute more for the same model. That is why you want the smallest m.

# %% tags=["check"] grade_id="check-micro-batches-needed" points=2
check.micro_batches_needed()

# %% [markdown]
# ## Exercise 5.4 · What communication really costs (20 min, 3 points)
#
# The time of an all-reduce says little, because it may be hidden behind backward. What counts is how much *longer* a
# step takes because of communication. `communication_cost(model, loss_of, now_ms, rounds=10)` measures steps with and
# without communication, and returns two numbers:
#
# ```python
# compute_ms = median over the rounds of (time of forward, backward and finish, inside no_sync)
# exposed_ms = median over the rounds of (time of the same, outside, minus the time inside)
# ```
#
# Why is `exposed_ms` not the difference of two medians? A shared machine is slow in some rounds and fast in others. If
# a round is slow as a whole, both of its steps are. Subtract within the round, and most of that cancels. Two medians
# may come from different rounds, a slow one and a fast one. And why medians at all? A single odd round hardly changes
# them.
#
# The difference also contains the work of hooks and copies, and the time that backward loses because sending uses the
# same cores.
#
# - Alternate between the two kinds of step. In each round, the step inside `no_sync()` comes first.
# - Measure `rounds` rounds, after one additional warm-up round, which does not count.
# - Each measurement starts on all ranks at once: call `dist.barrier()` before you read the clock.
# - All gradients are None when a measurement starts. The model that you get may already have some.
# - `loss_of(model)` runs forward and returns the loss. `now_ms()` reads the clock in milliseconds. On a GPU, it first
#   waits until the GPU has finished.
# - Read the clock right before forward and right after `finish_gradient_sync()`, in both kinds of step.
# - If noise makes `exposed_ms` negative, return it as it is. Returning 0 would hide how large the noise is.
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
        compute_ms, the median time of a step without communication, and exposed_ms, the median of how much longer the
        step with communication is in the same round.
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
    pairs = zip(without_sync_ms[1:], with_sync_ms[1:], strict=True)
    exposed_ms = statistics.median(longer - shorter for shorter, longer in pairs)
    return compute_ms, exposed_ms
    ### END SOLUTION


# %% tags=["check"] grade_id="check-communication-cost" points=3
check.communication_cost()

# %% [markdown]
# ## Your run (15 min)
#
# Now put everything together on four ranks behind the link: predict the knee, measure it, and use accumulation to win
# back what is lost to the left of it. The model is the lesson's GPT with 2.7 million parameters. As a stand-in for a
# GPU, each of its six blocks sleeps for 1/32 ms per token in forward and 1/16 ms in backward. `CAP_MB` is yours to
# change.

# %%
# %%ranks
from shared import measure
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu
from solutions.overlapped_ddp import OverlappedDDP

CAP_MB = 2.0
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
inputs, targets = text.windows([1000 * rank], length=16)


def gpu_with(tokens):
    model = TinyGPT(config)
    stand_in_for_gpu(model.blocks, forward_ms=tokens / 32, backward_ms=tokens / 16)
    return OverlappedDDP(model, bucket_cap_mb=CAP_MB)


def now_ms():
    return 1e3 * measure.now_s()


# %% [markdown]
# Fit α and β to all-reduces as large as the buckets, and note when each gradient is ready, as a fraction of a step
# inside `no_sync()`:

# %%
# %%ranks
sizes_bytes = (400_000, 1_000_000, 2_000_000, 4_000_000)
sums = measure.collectives({"all-reduce": dist.all_reduce}, sizes_bytes, rounds=20)
fit = sums.fit("all-reduce", sends="ring all-reduce")
alpha_s, beta_s = fit.alpha_s, fit.beta_s_per_byte

model = gpu_with(256)
parameters = sum(p.numel() for p in model.parameters())
fractions = measure.ready_fractions(model, inputs, targets, rounds=5)
flops_per_s = 4 * parameters / (6 / 16 * 1e-3)  # backward takes 6/16 ms per token
needed = tokens_needed(
    parameters, flops_per_s, world_size, alpha_s, beta_s, len(model.buckets), bytes_each=4
)

# %% tags=["nbval-ignore-output"]
alpha_s, beta_s, needed = (ranks.pull(name)[0] for name in ("alpha_s", "beta_s", "needed"))
print(f"α = {1e6 * alpha_s:.0f} µs, 1/β = {1e-6 / beta_s:.0f} MB/s: {needed:.0f} tokens needed")
measure.expect(0.75 < 8e-9 / beta_s < 1.25, "β is near the 8 ns per byte of 1 Gbit/s")

# %% [markdown]
# If 1/β is above the link's 125 MB/s, do not believe it. A fit that finds too large an α makes up for it with too small
# a β. Between the sizes that you have measured, the two errors almost cancel, so its predictions are still good there.
#
# **Predict.** With 96 tokens, for what fraction of a step will the ranks compute? And how many micro-batches of 96
# tokens will it take to reach 80%?

# %%
my_prediction = {"percent": None, "micro-batches": None}

# %% [markdown]
# Measure the steps. With communication, all ranks finish together, because each waits for the slowest. So we keep the
# costs of the rank that computes longest.


# %%
# %%ranks --timeout 180
def cost_of(model, micro_batches=1):
    """Return your communication_cost of a step that accumulates micro-batches, of the rank that computes longest."""

    def loss_of(wrapped):
        with wrapped.no_sync():
            for _ in range(micro_batches - 1):
                wrapped(inputs, targets).backward()
        return wrapped(inputs, targets)

    costs = [None] * world_size
    dist.all_gather_object(costs, communication_cost(model, loss_of, now_ms, rounds=7))
    return max(costs)


costs_ms = {tokens: cost_of(gpu_with(tokens)) for tokens in (96, 192, 384, 768, 1536)}

# %% [markdown]
# Your exercise 5.3 reads the first of these costs, and chooses how many micro-batches of 96 tokens to accumulate:

# %%
# %%ranks --timeout 180
TARGET = 0.8
compute_ms, exposed_ms = costs_ms[96]
micro_batches = micro_batches_needed(compute_ms, exposed_ms, TARGET)
accumulated_ms = cost_of(gpu_with(96), micro_batches)

# %%
# %%ranks
awake_s = statistics.median(ms / 1e3 - tokens * 9 / 16e3 for tokens, (ms, _) in costs_ms.items())
curve = {}
for tokens in range(80, 1700, 16):
    compute_s = awake_s + tokens * 9 / 16e3  # 9/16 ms per token in forward and backward
    gradients = [(fraction * compute_s, size_bytes) for fraction, size_bytes in fractions]
    cap_bytes = int(CAP_MB * 2**20)
    curve[tokens] = efficiency(gradients, compute_s, cap_bytes, world_size, alpha_s, beta_s)

# %% [markdown]
# The line in your figure is your `efficiency`, for a rank with more and more tokens, the dashed line your
# `tokens_needed`, and the marks your `communication_cost`. The filled mark is the step with accumulation. It stands at
# the tokens of the whole step. Compare it with a single batch of as many tokens.

# %% tags=["nbval-ignore-output"]
costs_ms, curve = ranks.pull("costs_ms")[0], ranks.pull("curve")[0]
(compute_ms, exposed_ms), m = ranks.pull("accumulated_ms")[0], ranks.pull("micro_batches")[0]
computing = {tokens: of / (of + exposed) for tokens, (of, exposed) in costs_ms.items()}
reached = compute_ms / (compute_ms + exposed_ms)
print(predicted(my_prediction["percent"], "{}% at 96 tokens", "\n"), end="")
print(predicted(my_prediction["micro-batches"], "{} micro-batches", "\n"), end="")
print(f"measured: {computing[96]:.0%} at 96 tokens, {reached:.0%} with {m} micro-batches")
where = ranks.pull("sums")[0].where
marks = {f"measured {where}": computing, f"{m} micro-batches of 96": {96 * m: reached}}
scaling_plots.knee({"your efficiency": curve}, marks, needed)

# %% tags=["claims", "nbval-ignore-output"] jupyter={"source_hidden": true}
measure.expect(computing[96] < 0.6, "left of the knee, communication is exposed")
measure.expect(computing[1536] > 0.85, "right of the knee, it is hidden")
measure.expect(reached > computing[96] + 0.15, "accumulation exposes a smaller part")
measure.expect(abs(reached - 0.8) < 0.12, "accumulation comes near its target")
measure.expect(abs(curve[768] - computing[768]) < 0.12, "the prediction comes near the measurement")

# %% [markdown]
# Your marks level off near your dashed line, and lie below your own line, by a few points on an idle machine and by ten
# or more on a busy one: the cost model assumes that sending needs no core and that no rank is slow. Accumulation nears
# its target, and still wastes more than one batch of as many tokens would, because only its last backward hides
# anything.
#
# And more ranks? The last table continues your `efficiency` to ranks that you do not have, for 768 tokens per rank in
# weak scaling, and for 768 tokens in total in strong scaling. The measured numbers are in the sweep: four ranks that
# share 768 tokens have 192 each. Expect them some points lower, for the same reasons. Strong scaling adds one more:
# what a step computes besides its sleep does not shrink to 1/N, as your `efficiency` assumes. And check your α before
# you believe the row of 64 ranks: its latency is 126 α per bucket, and your fit's α is uncertain.

# %%
# %%ranks
compute_s = awake_s + 768 * 9 / 16e3
gradients = [(fraction * compute_s, size_bytes) for fraction, size_bytes in fractions]
link = int(CAP_MB * 2**20), alpha_s, beta_s
rows = []
for n in (2, 4, 8, 64):
    parts = [
        efficiency(gradients, compute_s, link[0], n, *link[1:], kind) for kind in ("weak", "strong")
    ]
    rows.append([f"{n}", *(f"{part:.0%}" for part in parts)])

# %% tags=["nbval-ignore-output"]
one_ms = costs_ms[768][0]
weak, strong = one_ms / sum(costs_ms[768]), one_ms / (4 * sum(costs_ms[192]))
note = f"Measured on 4 ranks: weak {weak:.0%}, strong {strong:.0%}"
tables.Table(["ranks", "weak", "strong"], ranks.pull("rows")[0], note)

# %% [markdown]
# Change `CAP_MB` to 25 and run this part again, if you like. Which marks move, and why do those on the right move less
# than those at the knee?
#
# More ranks do not save memory: each of them still holds all parameters, all gradients and the full optimizer state.
# Chapter 06 counts those bytes.

# %%
ranks.stop()
