# ---
# jupyter:
#   course:
#     module: bucketed_ddp
#     minutes: 60
# ---

# %% [markdown]
# # Lab 03 · Gradient bucketing
#
# **60 minutes, 11 points.** You build `BucketedDDP`: the same gradients as `ManualDDP` up to rounding, the same
# bytes, in a handful of messages. Two small objects do the work: a list that says which gradients travel together, and
# a *bucket* that carries them.
#
# Each exercise has a check. It draws new weights, samples and sizes every time.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks, tables
from shared.checks import bucketed_ddp as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Data parallelism with gradient buckets: the same bytes in fewer messages."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from solutions.manual_ddp import broadcast_state

MB = 2**20  # bytes, as torch's DDP counts its bucket_cap_mb

# %% [markdown]
# ## Exercise 3.1 · One tensor, many gradients (10 min, 2 points)
#
# Make room for the gradients of `parameters` in one flat tensor, and cut it into *slices*: views of the flat tensor,
# each with its parameter's shape. Nothing is copied: what is written into a slice stands in the flat tensor.
# ```python
# place = 0
# for parameter, piece in zip(parameters, slices):
#     for i in range(parameter.numel()):          # piece.flatten()[i] is flat[place], the same memory
#         place += 1
# ```
# Target: one allocation, as many elements as the gradients have, zeros to begin with, their dtype, their device.


# %% tags=["exercise", "export"] grade_id="flat-and-slices"
# %%ranks
def flat_and_slices(parameters: list[nn.Parameter]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate one flat tensor for the gradients of parameters, which share a dtype and a device.

    Shapes: → flat [sum of numel()], and per parameter a view of flat with the parameter's shape
    """
    ### BEGIN SOLUTION
    sizes = [parameter.numel() for parameter in parameters]
    flat = torch.zeros(sum(sizes), dtype=parameters[0].dtype, device=parameters[0].device)
    pieces = flat.split(sizes)
    return flat, [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)]
    ### END SOLUTION


# %% tags=["check"] grade_id="check-flat-and-slices" points=2
check.flat_and_slices()

# %% [markdown]
# ## Exercise 3.2 · Who travels with whom (15 min, 3 points)
#
# Split the *trainable* parameters into buckets.
#
# - In **reverse order**: backward completes the last layers' gradients first.
# - A parameter goes into the bucket that was opened last *for its dtype and device*. If it does not fit in there, that
#   bucket is closed for good, and a new one opened. Buckets are listed in the order in which they were opened.
# - A bucket holds at most `bucket_cap_mb` · 2²⁰ bytes, the first of each dtype and device at most `first_bucket_mb`
#   (never more than `bucket_cap_mb`). A parameter larger than its cap has a bucket to itself.
#
# With a cap of 3 for all, and gradients of 1, 1, 1, 2, 4 and 1 bytes in the model's order:
# ```python
# [[1], [4], [2, 1], [1, 1]]          # read the model's order from its end
# ```


# %% tags=["exercise", "export"] grade_id="assign-buckets"
# %%ranks
def assign_buckets(
    parameters: Iterable[nn.Parameter], bucket_cap_mb: float = 25.0, first_bucket_mb: float = 1.0
) -> list[list[nn.Parameter]]:
    """Split trainable parameters into buckets, in the order in which backward() completes their gradients.

    Units: caps in MB of 2²⁰ bytes. The first bucket of each dtype is smaller, so that it can leave early.
    Source: torch's DDP with its default cap has the same order and caps, but closes a bucket once it is at or over
    its cap.
    """
    ### BEGIN SOLUTION
    buckets = []
    filling = {}  # per dtype and device: the open bucket, and how many bytes it has room for
    for parameter in reversed(list(parameters)):
        if not parameter.requires_grad:
            continue
        kind = (parameter.dtype, parameter.device)
        bucket, room_bytes = filling.get(kind, (None, 0))
        if bucket is None or parameter.nbytes > room_bytes:
            cap_mb = bucket_cap_mb if kind in filling else min(first_bucket_mb, bucket_cap_mb)
            bucket, room_bytes = [], cap_mb * MB
            buckets.append(bucket)
        bucket.append(parameter)
        filling[kind] = bucket, room_bytes - parameter.nbytes
    return buckets
    ### END SOLUTION


# %% tags=["check"] grade_id="check-assign-buckets" points=3
check.assign_buckets()

# %% [markdown]
# ## Exercise 3.3 · Break it (15 min, 3 points)
#
# If each parameter's `.grad` *is* its slice, backward writes straight into the flat tensor, and nothing has to be
# copied, in or out. So why not tie them together once, when the bucket is made?


# %%
# %%ranks
class TiedOnce:
    """A bucket whose gradients are made slices once and for all."""

    def __init__(self, parameters):
        self.flat, slices = flat_and_slices(parameters)
        for parameter, piece in zip(parameters, slices, strict=True):
            parameter.grad = piece

    def average(self):
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()


# %% [markdown]
# Two steps of a training loop, as everybody writes it. **Predict** the gradient that each rank steps with, in step 0
# and in step 1. (Rank r's own is r + 1.)

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
# No error, and from step 1 on every rank trains alone. What does `zero_grad()` leave in `.grad`, and what does
# `backward()` do with what it finds there?
#
# Write the bucket that survives it. `pack(place)` brings one gradient home, divided by the number of ranks, and makes
# `.grad` its slice; `launch()` sends all of them at once and does not wait (chapter 01: `async_op=True`); `wait()`
# does.
#
# Target: one message. A `grad` that is None counts as zeros; one that is its slice already stays there; one that is
# itself differentiable (`backward(create_graph=True)`) is refused with a `RuntimeError` that says why: a message is not
# part of any graph.


# %% tags=["exercise", "export"] grade_id="bucket"
# %%ranks
class Bucket:
    """The gradients of its `parameters`, which travel in one message: slices of one flat tensor.

    Once packed, a parameter's .grad *is* its slice: what arrives need not be copied back, and no second copy is held.
    Comm: launch() is one all_reduce of the flat tensor.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        ### BEGIN SOLUTION
        self.parameters, self.group = parameters, group
        self.flat, self.slices = flat_and_slices(parameters)
        # torch.div would make a tensor of a number in every call
        self.divisor = torch.tensor(float(dist.get_world_size(group)))
        self.handle = None
        ### END SOLUTION

    def pack(self, place: int) -> None:
        """Bring the gradient of parameters[place] home, divided by the number of ranks; None counts as zeros.

        Raises: RuntimeError for a gradient that is itself differentiable.
        """
        ### BEGIN SOLUTION
        parameter, piece = self.parameters[place], self.slices[place]
        if parameter.grad is None:
            piece.zero_()
        elif parameter.grad.requires_grad:
            raise RuntimeError("create_graph=True: messages have no graph; use the module itself")
        else:
            torch.div(parameter.grad, self.divisor, out=piece)
        parameter.grad = piece
        ### END SOLUTION

    def launch(self) -> None:
        """Begin to add the flat tensor up over the group."""
        ### BEGIN SOLUTION
        self.handle = dist.all_reduce(self.flat, group=self.group, async_op=True)
        ### END SOLUTION

    def wait(self) -> None:
        """Wait until what launch() began is done. Raises: RuntimeError where nothing is under way."""
        ### BEGIN SOLUTION
        if self.handle is None:
            raise RuntimeError("nothing is under way: launch() comes before wait()")
        self.handle.wait()
        self.handle = None
        ### END SOLUTION


# %% tags=["check"] grade_id="check-bucket" points=3
check.Bucket()

# %% [markdown]
# ## Exercise 3.4 · The wrapper (10 min, 3 points)
#
# `BucketedDDP(module, bucket_cap_mb=25.0, group=None)` is used as `ManualDDP` was. Its messages are the buckets of
# `assign_buckets`, in that order, and all of them are on their way before the first is waited for.
#
# Target: as many messages as `assign_buckets` gives buckets, with the gradients' bytes, all in
# `finish_gradient_sync()`.


# %% tags=["exercise", "export"] grade_id="bucketed-ddp"
# %%ranks
class BucketedDDP(nn.Module):
    """Train a replica of module on each rank of the group, with gradients averaged bucket by bucket.

    Call finish_gradient_sync() after backward() and before the optimizer's step. `.module` is the module itself.

    Comm: when built, one broadcast per parameter and buffer; per step, one all_reduce per bucket.
    Raises: RuntimeError, at the latest in finish_gradient_sync(), for backward(create_graph=True).
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
        """Average what backward() has accumulated since zero_grad()."""
        ### BEGIN SOLUTION
        for bucket in self.buckets:
            for place in range(len(bucket.parameters)):
                bucket.pack(place)
            bucket.launch()
        for bucket in self.buckets:
            bucket.wait()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-bucketed-ddp" points=3
check.BucketedDDP()

# %% [markdown]
# ## Your figure, and torch's answer (10 min)
#
# Three wrappers train a small GPT on text, from the same start: chapter 02's, yours, torch's. In a group of their own
# the ranks do not compare notes before each message (chapter 00), so that times mean something.


# %%
# %%ranks
from functools import partial

from torch.nn.parallel import DistributedDataParallel

from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from solutions.manual_ddp import ManualDDP, mean_over_ranks_

plain = dist.new_group()
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6)


def torchs(module):
    return DistributedDataParallel(module, process_group=plain, gradient_as_bucket_view=True)


wrappers = {
    "ManualDDP": partial(ManualDDP, group=plain),
    "BucketedDDP": partial(BucketedDDP, group=plain),
    "torch's DDP": torchs,
}


# %%
# %%ranks
def compute_and_sync(model, step=0):
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text.tokens) - 33, (4 * world_size,), generator=draw)
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
        mean_over_ranks_(loss, plain)
        losses.append(loss.item())
    return model, losses


# %%
# %%ranks
trained = {name: train(wrap) for name, wrap in wrappers.items()}
losses = {name: of_model for name, (_, of_model) in trained.items()}
print(f"from {losses['BucketedDDP'][0]:.1f} to {losses['BucketedDDP'][-1]:.1f}")

# %%
curves = ranks.pull("losses")[0]
apart = max(max(each) - min(each) for each in zip(*curves.values(), strict=True))
print(f"largest difference below 0.01: {apart < 0.01}")
assert apart < 0.01
plots.loss_curves(curves)

# %% [markdown]
# The same training, then. What does one step of each send, how long does it take, and what does a rank hold? Times are
# taken in turn.

# %%
# %%ranks
import time
from statistics import median

from shared import memory, wire


def now_ms():
    if device.type == "cuda":
        torch.cuda.synchronize()  # a GPU still works when the call has returned
    return time.perf_counter() * 1e3


def step_ms(model):
    model.zero_grad()
    dist.barrier(plain)
    began_ms = now_ms()
    compute_and_sync(model)
    return now_ms() - began_ms


models = {name: model for name, (model, _) in trained.items()}
rounds = [[step_ms(model) for model in models.values()] for _ in range(11)][1:]
times_ms = dict(zip(models, map(median, zip(*rounds, strict=True)), strict=True))


# %%
# %%ranks
def synced_bytes(held):
    return held.gradients_bytes + held.buckets_bytes


def observed(model):
    """→ the ledger of a step, the bytes at its peak, and the most bytes of gradients and buckets"""
    model.zero_grad()
    with wire.ledger() as log, memory.peak(model) as peak:
        compute_and_sync(model)
    return log, peak.held.total_bytes, max(synced_bytes(sample.held) for sample in peak.samples)


observations = {name: observed(model) for name, model in models.items()}

# %% tags=["nbval-ignore-output"]
observations, of_ranks = ranks.pull("observations")[0], ranks.pull("times_ms")
rows = []
for name, (log, peak_bytes, _) in observations.items():
    slowest_ms = max(times_ms[name] for times_ms in of_ranks)
    sent = [str(log.messages), f"{log.sent_bytes / 1e6:.2f}"]
    rows.append([name, *sent, f"{slowest_ms:.0f}", f"{peak_bytes / 1e6:.1f}"])
tables.Table(["", "messages", "MB sent per rank", "ms per step", "MB at the peak"], rows)

# %% [markdown]
# The peak is when backward begins: all activations are there, and in two of the three the buckets too. And how much
# memory do gradients and buckets take at most, in the whole step?

# %% tags=["nbval-ignore-output"]
logs = {name: log for name, (log, _, _) in observations.items()}
assert logs["BucketedDDP"].messages < logs["ManualDDP"].messages / 10
assert all(log.sent_bytes == logs["ManualDDP"].sent_bytes for log in logs.values())
most_mb = {name: most_bytes / 1e6 for name, (*_, most_bytes) in observations.items()}
plots.bars(most_mb, "MB of gradients and buckets, at most")

# %% [markdown]
# The same losses and the same bytes, in a handful of messages. But with yours, all gradients are there twice:
# `zero_grad()` has thrown the slices away, so backward makes every gradient anew, beside the buckets, and they are
# packed only when backward is over. torch packs each gradient in the moment in which it has come. And what is packed
# early can leave early: that is chapter 04.

# %%
ranks.stop()
