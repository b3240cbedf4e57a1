# ---
# jupyter:
#   course:
#     module: bucketed_ddp
#     minutes: 60
# ---

# %% [markdown]
# # Lab 03 · Gradient bucketing
#
# **60 minutes, 11 points.** You build `BucketedDDP`. It computes the same gradients as `ManualDDP` (up to rounding) and
# sends the same bytes, but with only a handful of all-reduces. Two small pieces do the work: a function that assigns
# gradients to buckets, and a `Bucket` that averages the gradients of one bucket.
#
# Each exercise has a check. It draws new weights, samples and sizes every time.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks, tables
from shared.checks import bucketed_ddp as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Data parallelism with gradient buckets: the same bytes in fewer collectives."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from solutions.manual_ddp import broadcast_state

MB = 2**20  # bytes, as in the bucket_cap_mb of torch's DDP

# %% [markdown]
# ## Exercise 3.1 · One tensor, many gradients (10 min, 2 points)
#
# Allocate one **flat tensor** for the gradients of all `parameters`, and split it into **slices**: views of the flat
# tensor, each with the shape of its parameter. A slice has no memory of its own, so what you write into a slice is in
# the flat tensor at once.
# ```python
# index = 0
# for parameter, grad_slice in zip(parameters, slices):
#     for i in range(parameter.numel()):          # grad_slice.flatten()[i] and flat[index] share their memory
#         index += 1
# ```
# Target: one allocation of zeros, with as many elements as the parameters together, and with their dtype and device.


# %% tags=["exercise", "export"] grade_id="flat-and-slices"
# %%ranks
def flat_and_slices(parameters: list[nn.Parameter]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate one flat tensor for the gradients of parameters that share a dtype and a device.

    Returns:
        The flat tensor, with one element per element of the parameters, and its slices: for each parameter, a view
        with the parameter's shape.
    """
    ### BEGIN SOLUTION
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    slices = [s.view(p.shape) for s, p in zip(flat.split(sizes), parameters, strict=True)]
    return flat, slices
    ### END SOLUTION


# %% tags=["check"] grade_id="check-flat-and-slices" points=2
check.flat_and_slices()

# %% [markdown]
# ## Exercise 3.2 · Assigning gradients to buckets (15 min, 3 points)
#
# Split the *trainable* parameters into buckets.
#
# - Go through the parameters in **reverse order**, because backward completes the gradients of the last layers first.
# - A parameter goes into the bucket that was opened last *for its dtype and device*. If it does not fit there, close
#   that bucket for good and open a new one. Return the buckets in the order in which they were opened.
# - A bucket holds at most `bucket_cap_mb` · 2²⁰ bytes. The first bucket of each dtype and device holds at most
#   `first_bucket_mb` (but never more than `bucket_cap_mb`). A parameter that is larger than the cap gets a bucket of
#   its own.
#
# For example, let the cap be 3 bytes for all buckets, and let the gradients have 1, 1, 1, 2, 4 and 1 bytes in the order
# of the model. Then the buckets are:
# ```python
# [[1], [4], [2, 1], [1, 1]]          # in reverse order of the model
# ```


# %% tags=["exercise", "export"] grade_id="assign-buckets"
# %%ranks
def assign_buckets(
    parameters: Iterable[nn.Parameter], bucket_cap_mb: float = 25.0, first_bucket_mb: float = 1.0
) -> list[list[nn.Parameter]]:
    """Split trainable parameters into buckets, in the order in which backward() completes their gradients.

    Args:
        parameters: The parameters of a module, in its order.
        bucket_cap_mb: How many MB (2²⁰ bytes) a bucket holds at most.
        first_bucket_mb: The cap of the first bucket of each dtype and device. It is smaller, so that the first
            collective can be launched early.

    Source: torch's DDP, with its default cap, uses the same order and caps, but it closes a bucket as soon as the
        bucket reaches or exceeds its cap.
    """
    ### BEGIN SOLUTION
    buckets = []
    open_buckets = {}  # by dtype and device: the open bucket, and how many bytes still fit into it
    for parameter in reversed(list(parameters)):
        if not parameter.requires_grad:
            continue
        key = (parameter.dtype, parameter.device)
        bucket, room_bytes = open_buckets.get(key, (None, 0))
        if bucket is None or parameter.nbytes > room_bytes:
            cap_mb = bucket_cap_mb if bucket else min(first_bucket_mb, bucket_cap_mb)
            bucket, room_bytes = [], cap_mb * MB
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[key] = bucket, room_bytes - parameter.nbytes
    return buckets
    ### END SOLUTION


# %% tags=["check"] grade_id="check-assign-buckets" points=3
check.assign_buckets()

# %% [markdown]
# ## Exercise 3.3 · Break it (15 min, 3 points)
#
# If the `.grad` of each parameter *is* its slice, backward writes directly into the flat tensor, and nothing needs to
# be copied into it or out of it. So why not make each `.grad` a slice once, when the bucket is created?


# %%
# %%ranks
class TiedOnce:
    """A bucket that makes gradients slices of its flat tensor only once."""

    def __init__(self, parameters):
        self.flat, slices = flat_and_slices(parameters)
        for parameter, grad_slice in zip(parameters, slices, strict=True):
            parameter.grad = grad_slice

    def average(self):
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()


# %% [markdown]
# The next cell runs two steps of an ordinary training loop. On rank r, backward computes the gradient r + 1.
# **Predict** the gradient that the optimizer of each rank uses in step 0 and in step 1.

# %%
# %%ranks
weight = nn.Parameter(torch.zeros(1, device=device))
bucket = TiedOnce([weight])
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(2):
    (weight * (rank + 1)).sum().backward()
    bucket.average()
    print(f"step {step}: gradient {weight.grad.item():.1f}")
    optimizer.step()
    optimizer.zero_grad()

# %% [markdown]
# There is no error, but from step 1 on, every rank trains with its own gradient. What does `zero_grad()` leave in
# `.grad`, and what does `backward()` do when it finds that there?
#
# Write a bucket that still works after `zero_grad()`:
#
# - `pack(index)` copies one gradient into its slice, divided by the number of ranks, and makes the slice the
#   parameter's `.grad`.
# - `launch()` starts one all-reduce of the flat tensor and does not wait for it (chapter 01: `async_op=True`).
# - `wait()` waits for it.
#
# Target: one all-reduce. A `grad` that is None counts as zeros. A `grad` that already is its slice stays there. A
# `grad` that is itself differentiable (after `backward(create_graph=True)`) raises a `RuntimeError` that says why: an
# all-reduce is not part of the autograd graph.


# %% tags=["exercise", "export"] grade_id="bucket"
# %%ranks
class Bucket:
    """Averages the gradients of its `parameters` with one all-reduce of a flat tensor.

    Once it is packed, a parameter's .grad *is* a slice of the flat tensor: nothing is copied back, or kept twice.

    Communication: launch() starts one all-reduce of the flat tensor.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        ### BEGIN SOLUTION
        self.parameters, self.group = parameters, group
        self.flat, self.slices = flat_and_slices(parameters)
        # A tensor, because torch.div would convert a number to a tensor in every call.
        self.divisor = torch.tensor(float(dist.get_world_size(group)))
        self.handle = None
        ### END SOLUTION

    def pack(self, index: int) -> None:
        """Copy the gradient of parameters[index], or zeros for None, into its slice, divided by the number of ranks."""
        ### BEGIN SOLUTION
        parameter, grad_slice = self.parameters[index], self.slices[index]
        if parameter.grad is None:
            grad_slice.zero_()
        elif parameter.grad.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True) is not supported, because an all-reduce is not part of "
                "the autograd graph: call the module itself instead of its wrapper"
            )
        else:
            torch.div(parameter.grad, self.divisor, out=grad_slice)
        parameter.grad = grad_slice
        ### END SOLUTION

    def launch(self) -> None:
        """Start the all-reduce of the flat tensor, and return at once."""
        ### BEGIN SOLUTION
        self.handle = dist.all_reduce(self.flat, group=self.group, async_op=True)
        ### END SOLUTION

    def wait(self) -> None:
        """Wait until the all-reduce is complete. Raises RuntimeError if none is in flight."""
        ### BEGIN SOLUTION
        if self.handle is None:
            raise RuntimeError("no all-reduce is in flight: call launch() before wait()")
        self.handle.wait()
        self.handle = None
        ### END SOLUTION


# %% tags=["check"] grade_id="check-bucket" points=3
check.Bucket()

# %% [markdown]
# ## Exercise 3.4 · The wrapper (10 min, 3 points)
#
# You use `BucketedDDP(module, bucket_cap_mb=25.0, group=None)` like `ManualDDP`. It launches one all-reduce for each
# bucket of `assign_buckets`, in that order. It launches all of them before it waits for the first.
#
# Target: one all-reduce per bucket, with the bytes of the gradients in total, all of them in `finish_gradient_sync()`.


# %% tags=["exercise", "export"] grade_id="bucketed-ddp"
# %%ranks
class BucketedDDP(nn.Module):
    """Trains a replica of a module on each rank of the group, and averages the gradients bucket by bucket.

    Call finish_gradient_sync() after backward() and before the optimizer's step. The wrapped module is available as
    `.module`.

    Communication: one broadcast per parameter and buffer when built, and one all-reduce per bucket in each step.
    """

    def __init__(
        self, module: nn.Module, bucket_cap_mb: float = 25.0, group: dist.ProcessGroup | None = None
    ):
        ### BEGIN SOLUTION
        super().__init__()
        self.module = module
        broadcast_state(module, group)
        assigned = assign_buckets(module.parameters(), bucket_cap_mb)
        self.buckets = [Bucket(parameters, group) for parameters in assigned]
        ### END SOLUTION

    def forward(self, *inputs, **kwargs):
        ### BEGIN SOLUTION
        return self.module(*inputs, **kwargs)
        ### END SOLUTION

    def finish_gradient_sync(self) -> None:
        """Average the gradients that backward() has accumulated since zero_grad().

        Raises:
            RuntimeError: After backward(create_graph=True).
        """
        ### BEGIN SOLUTION
        for bucket in self.buckets:
            for index in range(len(bucket.parameters)):
                bucket.pack(index)
            bucket.launch()
        for bucket in self.buckets:
            bucket.wait()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-bucketed-ddp" points=3
check.BucketedDDP()

# %% [markdown]
# ## Your figure, and torch's answer (10 min)
#
# Three wrappers train a small GPT on text, from the same initial state: `ManualDDP` of chapter 02, your `BucketedDDP`,
# and torch's DDP. They use a new process group, in which the ranks do not check each collective for mismatches (chapter
# 00), so that you can compare the times.


# %%
# %%ranks
from functools import partial

from torch.nn.parallel import DistributedDataParallel

from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.manual_ddp import ManualDDP, mean_over_ranks_

unchecked_group = dist.new_group()
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6)

wrappers = {
    "ManualDDP": partial(ManualDDP, group=unchecked_group),
    "BucketedDDP": partial(BucketedDDP, group=unchecked_group),
    "torch's DDP": partial(
        DistributedDataParallel, process_group=unchecked_group, gradient_as_bucket_view=True
    ),
}


# %%
# %%ranks
def compute_and_sync(model, step=0):
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text.tokens) - 33, (4 * world_size,), generator=generator)
    inputs, targets = text.windows(starts[rank::world_size], length=32)
    loss = model(inputs.to(device), targets.to(device))
    loss.backward()
    if not isinstance(model, DistributedDataParallel):
        model.finish_gradient_sync()
    return loss.detach()


def train(wrap, steps=20):
    model, losses = wrap(TinyGPT(config, seed=rank).to(device)), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        optimizer.zero_grad()
        loss = compute_and_sync(model, step)
        optimizer.step()
        mean_over_ranks_(loss, unchecked_group)
        losses.append(loss.item())
    return model, losses


# %%
# %%ranks
trained = {name: train(wrap) for name, wrap in wrappers.items()}
losses = {name: model_losses for name, (_, model_losses) in trained.items()}
first_loss, *_, last_loss = losses["BucketedDDP"]
print(f"The loss falls from {first_loss:.1f} to {last_loss:.1f}.")

# %%
curves = ranks.pull("losses")[0]
difference = max(max(losses) - min(losses) for losses in zip(*curves.values(), strict=True))
print(f"largest difference below 0.01: {difference < 0.01}")
assert difference < 0.01
plots.loss_curves(curves)

# %% [markdown]
# All three train in the same way. How many bytes does one step send, how long does it take, and how much does a rank
# hold? The next cells measure the three in turn.

# %%
# %%ranks
import time
from statistics import median

from shared import memory, wire


def now_ms():
    if device.type == "cuda":
        torch.cuda.synchronize()  # the GPU may still be computing when a call returns
    return time.perf_counter() * 1e3


def step_ms(model):
    model.zero_grad()
    dist.barrier(unchecked_group)
    began_ms = now_ms()
    compute_and_sync(model)
    return now_ms() - began_ms


models = {name: model for name, (model, _) in trained.items()}
rounds = [[step_ms(model) for model in models.values()] for _ in range(11)][1:]
times_ms = dict(zip(models, map(median, zip(*rounds, strict=True)), strict=True))


# %%
# %%ranks
def gradient_bytes(held):
    return held.gradients_bytes + held.buckets_bytes


def measure_step(model):
    """Run one step. Returns its ledger, its peak memory, and the peak of gradients and buckets alone."""
    model.zero_grad()
    with wire.ledger() as log, memory.peak(model) as peak:
        compute_and_sync(model)
    gradient_peak_bytes = max(gradient_bytes(sample.held) for sample in peak.samples)
    return log, peak.held.total_bytes, gradient_peak_bytes


measured = {name: measure_step(model) for name, model in models.items()}

# %% tags=["nbval-ignore-output"]
measured, times_of_ranks = ranks.pull("measured")[0], ranks.pull("times_ms")
rows = []
for name, (log, peak_bytes, _) in measured.items():
    slowest_ms = max(times_ms[name] for times_ms in times_of_ranks)
    sent = [str(log.messages), f"{log.sent_bytes / 1e6:.2f}"]
    rows.append([name, *sent, f"{slowest_ms:.0f}", f"{peak_bytes / 1e6:.1f}"])
tables.Table(["", "all-reduces", "sent per rank, MB", "step, ms", "peak, MB"], rows)

# %% [markdown]
# The peak is at the start of backward, when the rank holds all activations, and with two of the wrappers also the
# buckets. How much memory do gradients and buckets take at most during the step?

# %% tags=["nbval-ignore-output"]
logs = {name: log for name, (log, _, _) in measured.items()}
assert logs["BucketedDDP"].messages < logs["ManualDDP"].messages / 10
assert all(log.sent_bytes == logs["ManualDDP"].sent_bytes for log in logs.values())
peaks_mb = {name: gradient_peak / 1e6 for name, (*_, gradient_peak) in measured.items()}
plots.bars(peaks_mb, "peak of gradients and buckets, MB")

# %% [markdown]
# The losses and the bytes are the same, with only a handful of all-reduces. But with your wrapper, a rank holds all
# gradients twice. `zero_grad()` drops the slices, so backward allocates every gradient anew, next to the buckets, and
# you pack the gradients only after backward. torch's DDP packs each gradient as soon as it is complete. A bucket that
# is packed early can also be launched early, which is the topic of chapter 04.

# %%
ranks.stop()
