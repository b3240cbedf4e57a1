# ---
# jupyter:
#   course:
#     module: zero2
#     minutes: 80
# ---

# %% [markdown]
# # Lab 08 · ZeRO-2
#
# **80 minutes, 9 points.** In this lab, you build `ZeRO2`. It launches buckets while backward computes, as your
# `OverlappedDDP` does, but it reduce-scatters them. A rank keeps its shard of the mean gradient, and frees the rest. So
# a full gradient exists only from the moment when backward computes it until its bucket is reduced.
#
# The lesson's short version did that for one model and one training loop. Yours works with frozen, tied and unused
# parameters, and in loops that accumulate, clip, or forget a call. You build it in three steps:
#
# - `ShardedBucket` packs gradients, reduce-scatters them and frees them (8.1),
# - `ZeRO2` connects it with your pieces from labs 04 and 07 (8.2),
# - the same class then learns to work in every training loop (8.3).
#
# At the end, you compare the memory of `ZeRO2` with that of `ZeRO1` and of torch's FSDP2.
#
# Each exercise has a check. The checks judge values, the bytes that are sent, and the bytes that a rank holds at every
# moment of a backward, but never how long anything takes.
#
# If a class is too long for one cell, it continues in the next one: `class ZeRO2(ZeRO2):` adds methods to `ZeRO2`.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import zero2 as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""ZeRO stage 2: every rank holds all parameters, and one shard of the gradients and of the optimizer state."""

from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from shared import guards
from solutions.async_collectives import launch_reduce_scatter
from solutions.bucketed_ddp import assign_buckets
from solutions.flat import FlatParameter
from solutions.manual_ddp import broadcast_state
from solutions.overlapped_ddp import GradientSync
from solutions.overlapped_flat import OverlappedFlatParameter
from solutions.zero1 import ShardedOptimizer

# %% [markdown]
# ## Exercise 8.1 · A bucket that frees its gradients (22 min, 4 points)
#
# `ShardedBucket(flat_parameter)` reduces the gradients of the parameters in a `FlatParameter` from lab 07. It has the
# three methods that lab 04's `LaunchQueue` calls, in this order:
#
# | | what it does | what is held afterwards |
# |---|---|---|
# | `pack(index)` | moves one gradient into the flat tensor | the flat tensor |
# | `launch()` | launches the reduce-scatter of the flat tensor | the flat tensor and the receive buffer |
# | `wait()` | waits for it, and frees the flat tensor | this rank's shard of the mean gradient |
#
# The constructor is given. It sets these attributes, which other classes read:
#
# - `flat_parameter`, its `layout`, and `parameters`, the parameters of the layout,
# - `previous`: the bucket that is launched before this one, or None,
# - `flat`: the flat tensor of gradients, or None while no gradient is packed,
# - `in_flight`: the handle of the reduce-scatter, or None.
#
# Write `pack(index)` first. Its first lines are given: they allocate the flat tensor, filled with zeros, and set
# `views` to its slices, one per parameter. These zeros are negative, because a mean of −0.0 in every element tells the
# optimizer that no rank had a gradient. It then leaves out the parameter, as in one process.
#
# - Copy the gradient of `parameters[index]` into its slice, and set the parameter's `.grad` to None, which frees the
#   original.
# - The reduce-scatter will add up the gradients. Divide by the size of the group, `dist.get_world_size(layout.group)`,
#   once: either here or in `wait()`. (A group of None means all ranks.)
# - If the gradient is None, its slice stays as it is: zero, or a gradient that is packed already.
# - If the gradient is itself differentiable, raise a `RuntimeError` that names `create_graph`, as in lab 03.
#
# <details><summary>Hint</summary>After <code>.grad</code> is None, how can you still get at the gradient?
# <code>torch.div(a, b, out=c)</code> divides and copies in one call.</details>


# %% tags=["exercise", "export"] grade_id="sharded-bucket"
# %%ranks
class ShardedBucket:
    """The gradients of a flat parameter, held in full only until they are reduce-scattered.

    `flat` is the flat tensor of gradients, or None while no gradient is packed; `in_flight` is the reduce-scatter's
    handle, or None.
    """

    def __init__(self, flat_parameter: FlatParameter):
        self.flat_parameter, self.layout = flat_parameter, flat_parameter.layout
        self.parameters = self.layout.parameters
        self.previous: ShardedBucket | None = None  # the bucket that is launched before this one
        self.flat = self.views = self.in_flight = None

    def pack(self, index: int) -> None:
        """Move the gradient of parameters[index] into the flat tensor; None counts as zeros.

        Raises:
            RuntimeError: for a gradient that is itself differentiable.
        """
        if self.flat is None:
            self.flat = self.layout.new_flat().fill_(guards.UNUSED)  # [Note: negative zeros]
            self.views = self.layout.views(self.flat)
        ### BEGIN SOLUTION
        parameter = self.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return  # it may be packed already
        if gradient.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True) cannot be averaged: collectives do not record a graph"
            )
        torch.div(gradient, dist.get_world_size(self.layout.group), out=self.views[index])
        ### END SOLUTION


# %% [markdown]
# Try it on one rank. The first gradient should now be in the flat tensor (divided by 4, if you divide here), and its
# `.grad` should be None. The second gradient is not packed yet, and the flat tensor is padded to 8 elements:

# %%
# %%ranks 0
weights = [nn.Parameter(torch.zeros(count, device=device)) for count in (3, 2)]
for weight in weights:
    weight.grad = torch.full_like(weight, 4.0)
bucket = ShardedBucket(FlatParameter(weights))
bucket.pack(0)
print(bucket.flat.tolist(), [weight.grad is None for weight in weights])

# %% [markdown]
# Then write the other two methods:
#
# - `launch()` waits for the bucket `previous`, if there is one. Without this wait, all buckets could be alive at the
#   same time. Then it launches the reduce-scatter with lab 01's `launch_reduce_scatter(flat, group)`, and returns at
#   once. (The group is `layout.group`.)
# - `wait()` does nothing if no reduce-scatter is in flight. Otherwise, it waits for this rank's shard of the sum,
#   divides it unless `pack` has already done so, adds it to `flat_parameter.shard.grad`, and frees the flat tensor.
# - The shard's `.grad` may be None, or hold the mean of an earlier backward, because several backwards may be reduced
#   before a step. `shard.grad` must have the dtype of the shard. (In later labs, gradients may have another dtype.)
# - The handle's `wait()` returns a view of the flat tensor. Copy it, because a view in `shard.grad` would keep the
#   whole flat tensor alive.
#
# The first line of the check, `plain model`, reduces the gradients of a plain model on two ranks. The other lines try
# awkward models and gradients of None, count messages and bytes, and test which bucket waits for which.
#
# <details><summary>Hint 1</summary>Which attributes refer to the flat tensor, directly or through a view or a
# handle?</details>
# <details><summary>Hint 2</summary>What does <code>tensor.to(dtype)</code> return if the tensor already has this dtype?
# Which argument of <code>to()</code> changes that?</details>


# %% tags=["exercise", "export"] grade_id="sharded-bucket-2"
# %%ranks
class ShardedBucket(ShardedBucket):
    def launch(self) -> None:
        """Wait for the previous bucket's reduce-scatter, so that few buckets are alive at once, and launch this one's.

        Communication: one reduce-scatter.
        """
        ### BEGIN SOLUTION
        if self.previous is not None:
            self.previous.wait()
        with record_function("ZeRO::reduce_scatter"):
            self.in_flight = launch_reduce_scatter(self.flat, self.layout.group)
        ### END SOLUTION

    def wait(self) -> None:
        """Add this rank's shard of the mean gradient to shard.grad, and free the flat tensor, if it is in flight."""
        ### BEGIN SOLUTION
        if self.in_flight is None:
            return
        mean = self.in_flight.wait()
        shard = self.flat_parameter.shard
        if shard.grad is None:
            # A copy, because a view would keep the whole flat tensor alive.
            shard.grad = mean.to(shard.dtype, copy=True)
        else:
            shard.grad += mean
        self.flat = self.views = self.in_flight = None
        ### END SOLUTION


# %% tags=["check"] grade_id="check-sharded-bucket" points=4
check.ShardedBucket()

# %% [markdown]
# ## Exercise 8.2 · The wrapper (22 min, 3 points)
#
# `ZeRO2(module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults)` wraps a module, and contains its optimizer:
#
# ```python
# zero2.zero_grad()
# zero2(inputs).backward()           # buckets are reduced while backward computes
# zero2.finish_gradient_sync()       # has something to do only after no_sync(), or without a batch
# zero2.step()
# ```
#
# You have all the pieces. In the constructor, replace the `raise`, and leave the lines around it as they are:
#
# - Broadcast the module's parameters and buffers with lab 02's `broadcast_state(module, group)`.
# - Build `self.buckets`. Lab 03's `assign_buckets` returns lists of parameters. Turn each list into an
#   `OverlappedFlatParameter(parameters, group)`, and wrap that in a `ShardedBucket`. (This is lab 07's `FlatParameter`,
#   but its all-gather overlaps the next forward: whoever reads a parameter waits for it.)
# - Set each bucket's `previous`. The buckets are launched in the order of this list.
# - Create `self.sync`, lab 04's `GradientSync(self.buckets)`. Its hooks pack and launch the buckets. At the end of
#   backward, it launches the remaining ones and waits for all of them. Its `finish()` does the same if no backward has
#   done it.
#
# `self.optimizer` is given. It is lab 07's `ShardedOptimizer`, which updates the shards of the buckets' flat
# parameters. Its `step()` assumes that each `shard.grad` holds the mean gradient, and sets it to None afterwards.
#
# Then write `finish_gradient_sync()`, `step()` and `zero_grad()`. For now, they only have to work in the loop above,
# but `zero_grad()` must also drop gradients that no step has used. Leave `clip_grad_norm_()` for 8.3.
#
# The check takes 10 to 30 seconds. Look at the line `values` first: it trains a plain model on two ranks. The line
# `peak` says how much a rank may hold at any moment of backward, besides its shards of the gradients: three buckets and
# one gradient. They are the bucket in flight, its receive buffer, the bucket that is being packed, and the gradient
# that backward has just computed. (NCCL reduces each bucket in place, without a receive buffer.) The three buckets are
# the lesson's 2 + f, rounded up. The gradient comes on top of them, because `pack` allocates the whole flat tensor at
# the bucket's first gradient.
#
# <details><summary>Hint 1</summary><code>itertools.pairwise</code> is imported. It returns each element of a list
# together with the next one.</details>
# <details><summary>Hint 2</summary>Each of the three methods needs only one line here. Which object finishes the
# synchronization, which one updates the shards, and which one drops the gradients of both parameters and
# shards?</details>


# %% tags=["export"]
# %%ranks
def flat_parameters_of(
    buckets: list[ShardedBucket], parameters: list[nn.Parameter]
) -> list[FlatParameter]:
    """Return the flat parameters of the buckets, which hold all parameters of ZeRO2's only param group."""
    bucketed = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
    if bucketed != {id(parameter) for parameter in parameters if parameter.requires_grad}:
        raise ValueError("ZeRO2 trains the parameters of its module: add them before you wrap it")
    return [
        bucket.flat_parameter for bucket in reversed(buckets)
    ]  # in the order in which forward reads them


# %% tags=["exercise", "export"] grade_id="zero2"
# %%ranks
@guards.guarded(guards.Sharded)
class ZeRO2(nn.Module):
    """ZeRO stage 2: gradients are reduce-scattered and freed while backward computes; the optimizer state is sharded.

    `.optimizer` is for schedulers and state dicts. None counts as zeros, unless no rank has used the parameter. After
    step(), whoever reads a parameter waits for its all-gather; before an older `p.data`, call finish_parameter_sync().

    Memory: with Adam in fp32, 4Ψ + 4Ψ/N + 8Ψ/N bytes for Ψ parameters on N ranks; during backward up to 3 − 1/N buckets
        more, and the gradient being computed. Inside no_sync(), full gradients of 4Ψ bytes.
    Communication: per bucket, one reduce-scatter per backward outside no_sync(), and one all-gather per step. With g
        micro-batches, (g+1)(N−1)/N · 4Ψ bytes sent per rank; with no_sync(), 2(N−1)/N · 4Ψ.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.2 and §7.
    """

    def __init__(
        self, module: nn.Module, optimizer_cls, bucket_cap_mb: float = 25.0, group=None, **defaults
    ):
        super().__init__()
        self.module, self.synced = module, False
        ### BEGIN SOLUTION
        broadcast_state(module, group)
        assigned = assign_buckets(module.parameters(), bucket_cap_mb)
        flat_parameters = [OverlappedFlatParameter(parameters, group) for parameters in assigned]
        self.buckets = [ShardedBucket(flat_parameter) for flat_parameter in flat_parameters]
        for previous, bucket in pairwise(self.buckets):
            bucket.previous = previous
        self.sync = GradientSync(self.buckets)
        ### END SOLUTION
        flatten = partial(flat_parameters_of, self.buckets)  # deepcopy copies what a partial holds
        self.optimizer = ShardedOptimizer(
            module.parameters(), optimizer_cls, flatten, group, **defaults
        )

    _step_supports_amp_scaling = property(guards.reject_grad_scaler)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def no_sync(self):
        """Let full gradients accumulate on this rank, without communication."""
        return self.sync.no_sync()


# %% tags=["exercise", "export"] grade_id="zero2-2"
# %%ranks
class ZeRO2(ZeRO2):
    def finish_gradient_sync(self) -> None:
        """Reduce what no backward() has, as after no_sync() or without a batch; inside no_sync(), do nothing.

        Each .grad is None then, so code that reads or scales it does nothing. Use clip_grad_norm_(), scale the loss,
        or register a hook of the parameter.
        """
        ### BEGIN SOLUTION
        self.sync.finish()
        if self.sync.enabled:
            self.synced = True
        ### END SOLUTION

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most max_norm.

        Returns:
            The norm before scaling.
        """
        ### BEGIN SOLUTION
        self._finish_unless_synced()
        return self.optimizer.clip_grad_norm_(max_norm)
        ### END SOLUTION

    def step(self) -> None:
        """Update this rank's shard of the parameters and launch the all-gathers, for which readers wait."""
        ### BEGIN SOLUTION
        self._finish_unless_synced()
        self.optimizer.step()
        self.synced = False
        ### END SOLUTION

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        ### BEGIN SOLUTION
        self.synced = False
        if self.sync.done and not self.sync.pending:  # the loop has skipped step()
            self.sync.finish()  # sends nothing, and sets done to False
        self.optimizer.zero_grad(set_to_none)

    def _finish_unless_synced(self) -> None:
        # A rank that ran no backward() since zero_grad() must take part, too: do not decide by its gradients.
        if not self.synced or self.sync.pending or self.sync.done:
            self.finish_gradient_sync()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-zero2" points=3
check.ZeRO2()

# %% [markdown]
# ## Exercise 8.3 · Every training loop (23 min, 2 points)
#
# Suppose that rank 3 has run out of data. It runs no `backward()`, and calls `step()` at once. The other ranks launch
# reduce-scatters in their backward, and wait for rank 3 forever, unless its `step()` joins in. Other loops accumulate
# gradients, clip them, skip steps, or never call `finish_gradient_sync()`. Go back to your class, and make it work in
# all of these loops:
#
# - `clip_grad_norm_(max_norm)` clips with the optimizer's method of the same name. It is also the only way to learn the
#   norm of the gradients, because each `.grad` is `None` by then: a `max_norm` of infinity clips nothing.
# - `step()` and `clip_grad_norm_()` call `finish_gradient_sync()` themselves, unless it has been called since the last
#   `zero_grad()`, `step()` or `backward()`. A second call would reduce every bucket again.
# - Inside `no_sync()`, `finish_gradient_sync()` does nothing, so the gradients are still not synchronized afterwards.
#
# Three attributes help you find out whether it has been called:
#
# - `self.synced` is yours. It is True only if `finish_gradient_sync()` has synchronized since the last `zero_grad()` or
#   `step()`.
# - Lab 04's `self.sync.done` is True if a `backward()` has synchronized since the last `finish_gradient_sync()`, which
#   then has nothing left to do. Call it all the same, because it sets `done` to False. Otherwise, a rank without a
#   batch would still find True there in the next step, and launch nothing. A loop that skips a step calls only
#   `zero_grad()`, so that has to reset `done`, too: `self.sync.finish()` does, and sends nothing while `done` is True
#   and `pending` is False.
# - Lab 04's `self.sync.pending` is True if gradients computed since then are not synchronized, as after `no_sync()`.
#
# (`self.sync.enabled` is False inside `no_sync()`. You may assume that no loop calls `step()` or `clip_grad_norm_()`
# there.)
#
# Back to rank 3, which has run no `backward()` since `zero_grad()`. Its `step()` must decide like that of the other
# ranks, so `synced` must be the same on all ranks: unlike `pending` and `done`, it must not depend on whether this rank
# has run a `backward()`. While `synced` is True, you may use `pending` and `done`, because either all ranks run another
# `backward()` then or none does.
#
# The check also tries two ways of training on several micro-batches. In the first, full gradients accumulate inside
# `no_sync()`, and the last backward reduces them once. In the second, each `backward()` is followed by
# `finish_gradient_sync()`, so a rank holds little, but the gradients of every micro-batch are reduced. Both must give
# the same gradients. If your `wait()` adds to `shard.grad`, you need no extra code for this.
#
# No reduce-scatter may be repeated, and clipping may send only one additional element. The last three lines of the
# check copy, save and load the wrapper, and try `create_graph=True` again. The given code and your `pack` handle these.
#
# <details><summary>Hint 1</summary>Write one helper method, and call it in <code>step()</code> and in
# <code>clip_grad_norm_()</code>. Which two methods set <code>self.synced</code> to False? And may
# <code>finish_gradient_sync()</code> set it to True inside <code>no_sync()</code>?</details>
# <details><summary>Hint 2</summary>
#
# This is what `step()` finds after different loops. Before each of them, another `step()` has run. In which rows
# does `finish_gradient_sync()` still have to be called?
#
# | since that `step()` | `synced` | `pending` | `done` |
# |---|---|---|---|
# | `backward()` | False | False | True |
# | nothing, because this rank has no batch | False | False | False |
# | `backward()` inside `no_sync()` | False | True | False |
# | `backward()`, `finish_gradient_sync()` | True | False | False |
# | `backward()`, `finish_gradient_sync()`, `backward()` | True | False | True |
# | `backward()`, `finish_gradient_sync()`, `backward()` inside `no_sync()` | True | True | False |
#
# </details>

# %% tags=["check"] grade_id="check-zero2-loops" points=2
check.every_loop()

# %% [markdown]
# ## Break it: all-reduce, then slice (3 min)
#
# This is what DeepSpeed's stage 2 does by default: all-reduce the bucket, then keep this rank's shard and free the
# rest. Would a test that compares losses notice, or one that measures memory? The next cell builds such a version from
# yours:


# %%
# %%ranks
class AllReduceInFlight:
    """An all-reduce in flight. wait() returns this rank's shard of the sum."""

    def __init__(self, flat, group):
        self.own = flat.view(dist.get_world_size(group), -1)[dist.get_rank(group)]
        self.work = dist.all_reduce(flat, group=group, async_op=True)

    def wait(self):
        self.work.wait()
        return self.own


class AllReducingBucket(ShardedBucket):
    def launch(self):
        if self.previous is not None:
            self.previous.wait()
        self.in_flight = AllReduceInFlight(self.flat, self.flat_parameter.layout.group)


def all_reducing_zero2(*args, **kwargs):
    zero2 = ZeRO2(*args, **kwargs)
    for bucket in zero2.buckets:
        bucket.__class__ = AllReducingBucket
    return zero2


# %% [markdown]
# **Predict.** Which of these will differ from your version: the losses, the bytes that a step sends, the gradients that
# a rank holds when the optimizer's step begins? Set each one to True or False.

# %%
my_prediction = {"loss": None, "bytes sent": None, "gradients held": None}

# %% [markdown]
# ## Comparing your wrapper with torch's (10 min)
#
# Five versions train a GPT for four steps: torch's DDP with a plain AdamW, your `ZeRO1`, the version that slices, your
# `ZeRO2`, and torch's FSDP2. With `reshard_after_forward=False`, FSDP2 keeps unsharded parameters until backward has
# used them, which is the closest thing to ZeRO-2 in torch. Mismatch detection is turned off, because it adds a small
# all-reduce to each collective.

# %%
# %%ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch
from solutions.zero1 import ZeRO1

mismatch.ignore()
text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=4, width=128)
samples = text.windows(range(1000 * rank, 1000 * rank + 600, 100), length=64)
inputs, targets = (tensor.to(device) for tensor in samples)
adamw, settings = torch.optim.AdamW, {"lr": 3e-3}


# %%
# %%ranks
def new_model():
    model = TinyGPT(config).to(device)
    broadcast_state(model)
    return model


def in_ddp(model):
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return ddp, adamw(ddp.parameters(), **settings)


def in_fsdp2(model):
    mesh = init_device_mesh(device.type, (world_size,))
    for submodule in (*model.blocks, model):
        fully_shard(submodule, mesh=mesh, reshard_after_forward=False)
    return model, adamw(model.parameters(), **settings)


def in_zero1(model):
    return model, ZeRO1(model.parameters(), adamw, **settings)


def in_zero2(model, wrap=ZeRO2):
    wrapped = wrap(model, adamw, bucket_cap_mb=0.25, **settings)
    return wrapped, wrapped


# %%
# %%ranks
def finish(optimizer):
    """Synchronize the gradients of ZeRO1. The others have done so in backward()."""
    getattr(optimizer, "reduce_gradients", lambda: None)()


def steps_of(model, optimizer, steps=4):
    """Train. Returns the last loss, ledger and held memory, and then the memory over one more step."""
    for _ in range(steps):
        optimizer.zero_grad()
        with wire.ledger() as log:
            loss = model(inputs, targets)
            loss.backward()
            finish(optimizer)
            held = memory.held(model, optimizer)
            optimizer.step()
    optimizer.zero_grad()
    with memory.peak(model, optimizer) as peak:
        model(inputs, targets).backward()
        optimizer.step()
    return loss.item(), log, held, peak


# %%
# %%ranks
results = {
    "DDP, AdamW": steps_of(*in_ddp(new_model())),
    "your ZeRO1": steps_of(*in_zero1(new_model())),
    "all-reduce, then slice": steps_of(*in_zero2(new_model(), all_reducing_zero2)),
    "your ZeRO2": steps_of(*in_zero2(new_model())),
    "FSDP2": steps_of(*in_fsdp2(new_model())),
}

# %% tags=["nbval-ignore-output"]
from shared import plots, tables
from shared.predictions import predicted

results = ranks.pull("results")[0]
losses = [loss for loss, *_ in results.values()]
assert max(losses) - min(losses) < 1e-3
rows = [
    [
        name,
        f"{loss:.4f}",
        f"{log.messages}",
        f"{log.sent_bytes / 1e6:.2f}",
        f"{held.gradients_bytes / 1e6:.2f}",
        f"{peak.peak_bytes / 1e6:.2f}",
    ]
    for name, (loss, log, held, peak) in results.items()
]
note = (
    "Rank 0, one step, in MB. Gradients: held when the optimizer's step begins. "
    "On gloo, each of our collectives consists of 3 sends and 3 receives."
)
tables.Table(["", "loss", "operations", "must send", "gradients", "peak"], rows, note)

# %%
yours, slicing = results["your ZeRO2"], results["all-reduce, then slice"]
differs = {
    "loss": abs(yours[0] - slicing[0]) > 1e-3,
    "bytes sent": yours[1].sent_bytes != slicing[1].sent_bytes,
    "gradients held": yours[2].gradients_bytes != slicing[2].gradients_bytes,
}
for what, measured in differs.items():
    print(f"{what}: {predicted(my_prediction[what])}measured {measured}")
assert differs == {"loss": False, "bytes sent": True, "gradients held": False}
assert slicing[1].sent_bytes == 1.5 * yours[1].sent_bytes

# %% [markdown]
# The version that slices has the right losses, and holds no more gradients than yours. But it sends 1.5 times as many
# bytes. A test that looks only at values and memory would not notice. The peak of this version even seems to be 0.2 MB
# lower, but only because gloo's all-reduce allocates its receive buffer outside of torch, where we do not see it.
# FSDP2 holds only its shards of the parameters between steps. You will build that in chapter 09.
#
# Now look at the peaks of `ZeRO1` and `ZeRO2` in the table. The activations are part of both. Chapter 06 showed how to
# make them small: checkpoint every block.

# %% [markdown]
# **Predict.** With checkpointing, how high is the peak of your `ZeRO2`, as a fraction of the peak of your `ZeRO1`? 1
# means that they are equal.

# %%
my_prediction = None

# %%
# %%ranks
from torch.utils.checkpoint import checkpoint


def checkpointed_model():
    model = new_model()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


peaks = {name: results[name][-1] for name in ("your ZeRO1", "your ZeRO2")}
for name, wrap in {"your ZeRO1": in_zero1, "your ZeRO2": in_zero2}.items():
    peaks[f"{name}, checkpointed"] = steps_of(*wrap(checkpointed_model()))[-1]

# %% [markdown]
# Each bar shows what a rank holds at the peak of a step. Compare the gradients and the buckets:

# %% tags=["nbval-ignore-output"]
peaks = ranks.pull("peaks")[0]
zero1, zero2 = (peaks[f"your {name}, checkpointed"].peak_bytes for name in ("ZeRO1", "ZeRO2"))
print(f"{predicted(my_prediction)}measured {zero2 / zero1:.2f}")
assert zero2 < 0.95 * zero1
plots.memory_by_component({name: peak.held.by_component() for name, peak in peaks.items()})

# %% [markdown]
# `ZeRO1` holds all gradients during the whole step, so your `ZeRO2` needs less even without checkpointing. The lesson
# saw no difference, because its `ReduceAfterBackward` held no gradients yet when backward began. With checkpointing,
# gradients are a larger part of the peak, so `ZeRO2` saves a larger part of it.
#
# The next figure shows a step of your `ZeRO2` with checkpointing. Each hill is a block that is recomputed. Follow the
# gradients and the buckets below the hills:

# %% tags=["nbval-ignore-output"]
plots.memory_over_step(peaks["your ZeRO2, checkpointed"].samples)

# %% [markdown]
# Buckets are allocated and freed again and again. For the optimizer's step, only a quarter of the gradients remains.
# Then the parameters are the largest component, and all four ranks hold all of them. Chapter 09 shards them, too.

# %%
ranks.stop()
