# ---
# jupyter:
#   course:
#     module: bucketed_ddp
#     minutes: 60
# ---

# %% [markdown]
# # Lab 03 · Gradient bucketing
#
# **60 minutes, 11 points.** In this lab, you build `BucketedDDP`. Up to rounding, it computes the same gradients as
# `ManualDDP` from chapter 02. It also sends the same bytes, but in far fewer all-reduces. At the end, you train a GPT
# with it, and compare it with torch's DDP: losses, all-reduces, time and memory.
#
# Three small pieces do the work, one in each of the first three exercises:
#
# - `flat_and_slices` allocates the flat tensor of a bucket,
# - `assign_buckets` decides which gradients share a bucket,
# - `Bucket` averages the gradients of one bucket.
#
# The second code cell imports our `broadcast_state`. If your own version has passed its checks in lab 02, you can use
# that instead: write `from shared.mine import broadcast_state`. You can do the same with all pieces of earlier labs.
#
# Each exercise has a check, which draws new weights, samples and sizes at random every time. The first lines of a check
# try the plain case, and the others try unusual ones.

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks, tables
from shared.checks import bucketed_ddp as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Data parallelism with gradient buckets: the same bytes in fewer collectives."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from shared import guards
from solutions.manual_ddp import broadcast_state

MB = 2**20  # bytes, as in the bucket_cap_mb of torch's DDP

# %% [markdown]
# ## Exercise 3.1 · One tensor, many gradients (5 min, 2 points)
#
# Allocate one flat tensor for the gradients of all `parameters`, and split it into **slices**. A slice is a view of the
# flat tensor with the shape of its parameter. It has no memory of its own, so when you write into a slice, you write
# into the flat tensor. Return the flat tensor and the list of its slices.
#
# - The flat tensor is all zeros. It has as many elements as all parameters together, and their dtype and device.
# - The slices follow each other in the order of the parameters, without gaps.
# - The function changes neither the parameters nor their `.grad`.
#
# The lesson's `average_flat` made its flat tensor from the gradients. Here, there are no gradients yet, so you take the
# sizes, the dtype and the device from the parameters, and the slices stay views of the flat tensor.
#
# For example, take two parameters with the shapes [2] and [1, 3]. If the flat tensor has the elements a to e, then the
# slices are:
# ```python
# flat                     # [a b c d e]
# slices[0], slices[1]     # [a b], [[c d e]]
# ```
#
# <details><summary>Hint</summary>For a list of sizes, <code>flat.split(sizes)</code> returns one view of each size.
# Which method of a tensor returns a view with another shape?</details>


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
# Split the parameters into buckets. The lesson's `in_buckets` did this for one dtype and one cap. Yours also handles a
# smaller first bucket, several dtypes and devices, frozen parameters, and any iterable.
#
# Start with a plain model. The first line of the check, `buckets`, tests only the following rules, and sets
# `first_bucket_mb` equal to `bucket_cap_mb`:
#
# - Go through the parameters in **reverse order**, because backward completes the gradients of the last layers first.
# - Add each parameter to the bucket that was opened last. If it does not fit there, open a new bucket. Never go back to
#   an earlier bucket, even if it has room.
# - A bucket holds at most `bucket_cap_mb` · 2²⁰ bytes (2²⁰ is the constant `MB` above). A parameter that is larger than
#   its bucket's cap is alone in that bucket.
# - Return the buckets in the order in which they were opened.
#
# For example, suppose that the cap is 3 bytes, and that the gradients have 1, 1, 1, 2, 4 and 1 bytes in the order of
# the model. You start at the end of this list, so the buckets are:
# ```python
# [[1], [4], [2, 1], [1, 1]]          # bytes of the gradients in each bucket
# ```
# The first bucket has room for the 2, too. But by then, the 4 has opened another bucket.
#
# Then add the other rules, each of which has its own line in the check:
#
# - `first bucket`: the cap of the first bucket is `first_bucket_mb` or `bucket_cap_mb`, whichever is smaller.
# - `dtypes`: a flat tensor has one dtype and one device. So each combination of dtype and device has its own buckets,
#   and a first bucket of its own. A parameter then goes into the bucket that was opened last for its combination.
#   Return the buckets of all combinations in one list, in the order in which they were opened.
# - `trainable`: frozen parameters (`requires_grad=False`) are in no bucket.
# - `units`: both caps are in MB of 2²⁰ bytes, and have the defaults of the function below.
# - `any iterable`: `parameters` may be a generator, as `module.parameters()` is, so you can go through it only once.
#
# <details><summary>Hint 1</summary>For one dtype, two variables are enough: the bucket that was opened last, and how
# many bytes still fit into it. A gradient has <code>parameter.nbytes</code> bytes, like its parameter.</details>
# <details><summary>Hint 2</summary>For several dtypes and devices, keep these two variables in a dict. What is its key,
# and how do you notice that a key has no bucket yet?</details>


# %% tags=["exercise", "export"] grade_id="assign-buckets"
# %%ranks
def assign_buckets(
    parameters: Iterable[nn.Parameter], bucket_cap_mb: float = 25.0, first_bucket_mb: float = 1.0
) -> list[list[nn.Parameter]]:
    """Split trainable parameters into buckets, from the last parameter to the first.

    Args:
        parameters: The parameters of a module, in its order.
        bucket_cap_mb: The most MB (2²⁰ bytes) that a bucket holds. A larger parameter is alone in its bucket.
        first_bucket_mb: The cap of the first bucket of each dtype and device. It is smaller, so that the first
            collective can be launched early.

    Source: torch's DDP, with its default cap, uses the same caps, but it closes a bucket once the bucket has reached
        or exceeded its cap. From step 2 on, it follows the order in which backward() completed the gradients.
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


# %% [markdown]
# Try it on the example above. It should print `[[1], [4], [2, 1], [1, 1]]`:

# %%
# %%ranks 0
parameters = [nn.Parameter(torch.zeros(n)) for n in (1, 1, 1, 2, 4, 1)]  # 4 bytes per element
buckets = assign_buckets(parameters, 12 / MB, 12 / MB)
print([[parameter.numel() for parameter in bucket] for bucket in buckets])

# %% tags=["check"] grade_id="check-assign-buckets" points=3
check.assign_buckets()

# %% [markdown]
# ## Exercise 3.3 · Break a bucket, then fix it (20 min, 3 points)
#
# If the `.grad` of each parameter *is* its slice, backward writes directly into the flat tensor, and nothing has to be
# copied. Is it enough to make each `.grad` a slice once, when the bucket is created? The next class does that:


# %%
# %%ranks
class TiedOnce:
    """A bucket that makes each .grad a slice of its flat tensor, but only once."""

    def __init__(self, parameters):
        self.flat, slices = flat_and_slices(parameters)
        for parameter, grad_slice in zip(parameters, slices, strict=True):
            parameter.grad = grad_slice

    def average(self):
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()


# %% [markdown]
# The next cell runs two steps of an ordinary training loop on the four ranks. On rank r, backward computes the gradient
# r + 1. **Predict.** Which gradient does each rank's optimizer use in step 0, and which in step 1?

# %%
my_prediction = {"step 0": None, "step 1": None}  # a list with one gradient per rank

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
# There is no error, but from step 1 on, every rank trains with its own gradient instead of the mean. What does
# `zero_grad()` leave in `.grad`, and where does the next `backward()` put the gradient?
#
# Write a `Bucket` that still works after `zero_grad()`. Its constructor allocates the flat tensor, `self.flat`, and its
# slices, once, and changes no `.grad`. In every step, `pack` is called for each index, in any order, then `launch`, and
# then `wait`:
#
# - `pack(index)` fills the slice of `parameters[index]`, and makes the slice the parameter's `.grad`:
#     - The slice gets the gradient, divided by the number of ranks in the group, so that the all-reduce gives the mean.
#       (If you prefer, divide in `launch` or `wait` instead. The check looks only at the mean.)
#     - If `.grad` is None, the slice gets zeros.
#     - If `.grad` is already the slice, as after `zero_grad(set_to_none=False)`, divide it in place. It remains the
#       `.grad`.
# - `launch()` starts one asynchronous all-reduce of the flat tensor over the group, and does not wait for it.
# - `wait()` waits until this all-reduce is complete. If none is in flight, it raises a `RuntimeError`. So a second
#   `wait()` after one `launch()` raises it, too.
#
# In exercise 3.4, backward has finished before the first `pack`, so every gradient is still held twice at the peak.
# Chapter 04 packs each gradient as soon as it is complete.
#
# `reject_graph` is given, and `pack` already calls it. You need not read it: it rejects `backward(create_graph=True)`.
#
# <details><summary>Hint 1: pack</summary>Before <code>pack</code>, the slice may still hold the mean of the last step.
# Does your code overwrite all of it in each of the three cases? <code>torch.div(a, b, out=c)</code> writes the quotient
# into c, and c may be the same tensor as a.</details>
# <details><summary>Hint 2: launch and wait</summary><code>dist.all_reduce(..., async_op=True)</code> returns a handle
# at once, and <code>handle.wait()</code> waits. How can <code>Bucket.wait()</code> tell that no all-reduce is in
# flight?</details>


# %% tags=["export"]
# %%ranks
def reject_graph(gradient: torch.Tensor | None) -> None:
    """Raise a RuntimeError if a gradient is part of an autograd graph, because an all-reduce is not."""
    if gradient is not None and gradient.requires_grad:
        raise RuntimeError(
            "backward(create_graph=True) is not supported, because an all-reduce is not part of "
            "the autograd graph: call the module itself instead of its wrapper"
        )


# %% tags=["exercise", "export"] grade_id="bucket"
# %%ranks
class Bucket:
    """Averages the gradients of its `parameters` with one all-reduce of a flat tensor.

    Once a parameter is packed, its .grad *is* a slice of the flat tensor, so nothing has to be copied back.

    Communication: launch() starts one all-reduce of the flat tensor.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        self.parameters, self.group = parameters, group
        ### BEGIN SOLUTION
        self.flat, self.slices = flat_and_slices(parameters)
        # The divisor is a tensor, because torch.div would convert a number to a tensor in every call.
        self.divisor = torch.tensor(float(dist.get_world_size(group)))
        self.handle = None
        ### END SOLUTION

    def pack(self, index: int) -> None:
        """Copy the gradient of parameters[index], or zeros for None, into its slice, divided by the number of ranks."""
        parameter = self.parameters[index]
        reject_graph(parameter.grad)
        ### BEGIN SOLUTION
        grad_slice = self.slices[index]
        if parameter.grad is None:
            grad_slice.fill_(guards.UNUSED)  # [Note: negative zeros]
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
# Connect the pieces. `BucketedDDP(module, bucket_cap_mb=25.0, group=None)` is used like `ManualDDP`:
#
# - The constructor makes the module available as `.module`. It broadcasts the module's state with
#   `broadcast_state(module, group)`, which is imported from chapter 02. Then it creates one `Bucket` for each bucket
#   that `assign_buckets` returns, and stores them in the list `self.buckets`.
# - `@guards.guarded(…)` is given, as in lab 02. It reads `self.buckets`, and `parameters` and `flat` of each bucket.
# - All steps use the same buckets. So after `zero_grad(set_to_none=False)`, every `.grad` is still its slice, and no
#   gradient is held twice.
# - `forward` passes all its arguments to the module, and returns the module's output.
# - `finish_gradient_sync()` packs and launches the buckets in the order of `assign_buckets`. It launches **all** of
#   them before it waits for the first. When it returns, all of them are complete.
# - Nothing is sent during forward or backward.
#
# The check runs its other lines only if `same start` passes. Of those, look at `plain model` first. The rest train
# models with tied, frozen and unused parameters, buffers and several dtypes. If your first three pieces are right, you
# need no extra code for them.
#
# <details><summary>Hint</summary>If a rank waits for bucket 1 before it launches bucket 2, the link is idle in between.
# Which two loops over the buckets avoid that?</details>


# %% tags=["exercise", "export"] grade_id="bucketed-ddp"
# %%ranks
@guards.guarded(guards.PerBucket)
class BucketedDDP(nn.Module):
    """Trains a replica of a module on each rank of the group, and averages the gradients bucket by bucket.

    Call finish_gradient_sync() right after backward(), before you clip gradients and before the step. The wrapped
    module is available as `.module`. If no rank has used a parameter, its gradient is zeros, or None if you send −0.0
    for None (exercise 2.3).

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
# ## Comparing your wrapper with torch's (10 min)
#
# Three wrappers train a small GPT on text, from the same initial state: `ManualDDP` from chapter 02, your
# `BucketedDDP`, and torch's DDP. Mismatch detection (chapter 00) is turned off from here on, because it adds a small
# all-reduce to each collective.


# %%
# %%ranks
from functools import partial

from torch.nn.parallel import DistributedDataParallel

from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch
from solutions.manual_ddp import ManualDDP, mean_over_ranks_

mismatch.ignore()
text = CharTokens()
text.tokens = text.tokens.to(device)
config = GPTConfig(vocab_size=text.vocab_size, layers=6)
wrappers = {
    "ManualDDP": ManualDDP,
    "BucketedDDP": BucketedDDP,
    "torch's DDP": partial(DistributedDataParallel, gradient_as_bucket_view=True),
}


# %%
# %%ranks
def batch_of(step):
    """Draw four samples for each rank, different ones in each step. Returns those of this rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text.tokens) - 33, (4 * world_size,), generator=generator)
    return text.windows(starts[rank::world_size], length=32)


def compute_and_sync(model, step=0):
    loss = model(*batch_of(step))
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
        mean_over_ranks_(loss)
        losses.append(loss.item())
    return model, losses


# %%
# %%ranks
trained = {name: train(wrap) for name, wrap in wrappers.items()}
models = {name: model for name, (model, _) in trained.items()}
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
# All three curves coincide: your wrapper trains the same model as torch's. How long does a step take? As in the lesson,
# each rank is now behind a link of 1 Gbit/s with a latency of 2 ms. (With NCCL, the link is not emulated.)

# %% tags=["nbval-ignore-output"]
# %%ranks
from shared import measure

link = measure.behind_link("1gbit", latency_ms=2)
steps = {name: measure.training_step(model, *batch_of(0)) for name, model in models.items()}
times = measure.jobs(steps, rounds=10)
link.close()

# %% [markdown]
# Compare the step of `ManualDDP` with the other two:

# %% tags=["nbval-ignore-output"]
times = ranks.pull("times")[0]
measure.expect(times.ratio("ManualDDP", "BucketedDDP") > 1, "BucketedDDP is faster")
plots.bars(times.ms(), "ms per step (median of 10 rounds)")

# %% [markdown]
# torch's DDP launches buckets during backward, but that saves little here: its first bucket holds 86% of the gradients'
# bytes, so most of backward is over before this bucket is launched. Either DDP or your wrapper may be faster.
#
# The next cell counts the all-reduces of a step, and measures the peak memory of gradients and buckets.


# %%
# %%ranks
from shared import memory, wire


def measure_step(model):
    """Run one step. Returns its ledger, and the most bytes that gradients and buckets took together."""
    model.zero_grad()
    with wire.ledger() as log, memory.peak(model) as peak:
        compute_and_sync(model)
    held = [sample.held for sample in peak.samples]
    return log, max(each.gradients_bytes + each.buckets_bytes for each in held)


measured = {name: measure_step(model) for name, model in models.items()}

# %% tags=["nbval-ignore-output"]
measured = ranks.pull("measured")[0]
rows = [
    [name, f"{log.messages}", f"{log.sent_bytes / 1e6:.2f}", f"{peak_bytes / 1e6:.2f}"]
    for name, (log, peak_bytes) in measured.items()
]
(by_hand, _), (bucketed, yours_bytes), (_, torchs_bytes) = measured.values()
assert bucketed.messages < by_hand.messages / 10 and bucketed.sent_bytes == by_hand.sent_bytes
assert yours_bytes > 1.2 * torchs_bytes
header = ["", "all-reduces", "sent per rank, MB", "gradients and buckets at the peak, MB"]
tables.Table(header, rows)

# %% [markdown]
# Your wrapper sends the same bytes as `ManualDDP` with less than a tenth of the all-reduces. There are two buckets,
# because the first one has a cap of 1 MiB. But your wrapper holds more memory than torch's DDP. `zero_grad()` sets
# `.grad` to None, so backward allocates every gradient anew, in addition to the buckets, and your wrapper packs the
# gradients only after backward. torch's DDP packs each gradient as soon as it is complete. With
# `gradient_as_bucket_view=True`, as here, it also frees the original. So its peak is the buckets (1,226,752 bytes) plus
# the largest gradient (65,536 bytes).
#
# A bucket that is packed early can also be launched early. That is the topic of chapter 04.

# %%
ranks.stop()
