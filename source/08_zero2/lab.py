# ---
# jupyter:
#   course:
#     module: zero2
#     minutes: 60
# ---

# %% [markdown]
# # Lab 08 · ZeRO-2
#
# **60 minutes, 9 points.** You build `ZeRO2`. Its buckets are launched while backward computes, like those of lab 04,
# but each is reduce-scattered: a rank keeps its shard of the mean gradient and frees the rest. So a gradient lives from
# the moment backward computes it until its bucket is reduced.
#
# You build `ShardedBucket` (8.1), wire it up with what you have from labs 04 and 07 (8.2), and make it work in every
# training loop (8.3).
#
# Each exercise has a check. Times are never judged, but bytes are, at every moment of a backward.
#
# A class that is too long for one cell continues in the next: `class ZeRO2(ZeRO2):` adds methods to `ZeRO2`.

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

from solutions.async_collectives import launch_reduce_scatter
from solutions.bucketed_ddp import assign_buckets
from solutions.flat import FlatParameter
from solutions.manual_ddp import broadcast_state
from solutions.overlapped_ddp import GradientSync
from solutions.zero1 import ShardedOptimizer

# %% [markdown]
# ## Exercise 8.1 · A bucket that frees its gradients (20 min, 4 points)
#
# `ShardedBucket(flat_parameter)` holds the gradients of the parameters in lab 07's `FlatParameter`, but only for a
# short time. It has the three methods that lab 04's `LaunchQueue` calls:
#
# | | what it does | what is held then |
# |---|---|---|
# | `pack(index)` | allocates the flat tensor if needed, moves a gradient into it, and sets `.grad` to None | a bucket |
# | `launch()` | waits for the bucket `previous`, then launches this reduce-scatter | a bucket, and what is received |
# | `wait()` | adds this rank's shard of the mean to `flat_parameter.shard.grad`, and frees the flat tensor | a shard |
#
# Other classes read these attributes:
#
# - `flat_parameter`, and `parameters`, those of its layout.
# - `previous`: the bucket that is launched before this one, or None. Without waiting for it, all buckets could be alive
#   at once.
# - `flat`: the flat tensor of gradients, or None while no gradient is packed.
# - `in_flight`: the handle that `launch_reduce_scatter(flat, group)` of lab 01 returns, or None. Its `wait()` returns
#   this rank's shard of the sum, a view of `flat`.
#
# Start with a plain model. Then consider:
#
# - A gradient of None counts as zeros, even if all are None.
# - A gradient that is itself differentiable is rejected, as in lab 03: raise a RuntimeError that names `create_graph`.
# - `wait()` does nothing if nothing is in flight.
# - There may be several backwards before a step. The buckets are reduced after each of them, and the means add up in
#   `shard.grad`, in the shard's dtype. (From lab 09 on, the gradients may have another dtype.)
# - The mean in `shard.grad` must not be a view of the flat tensor, because that would keep all of it alive.
#
# <details><summary>Hint 1</summary>The reduce-scatter adds up. Where can you divide by the number of ranks, so that
# each gradient is divided once?</details>
# <details><summary>Hint 2</summary>What does <code>tensor.to(dtype)</code> return if the tensor has that dtype already?
# </details>


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
        ### BEGIN SOLUTION
        if self.flat is None:
            self.flat = self.layout.new_flat()
            self.views = self.layout.views(self.flat)
        parameter = self.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return
        if gradient.requires_grad:
            raise RuntimeError(
                "backward(create_graph=True) cannot be averaged: collectives do not record a graph"
            )
        torch.div(gradient, dist.get_world_size(self.layout.group), out=self.views[index])
        ### END SOLUTION


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
# ## Exercise 8.2 · The wrapper (20 min, 3 points)
#
# `ZeRO2(module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults)` wraps a module and has its optimizer
# inside:
#
# ```python
# zero2.zero_grad()
# zero2(inputs).backward()           # buckets are reduced while backward computes
# zero2.finish_gradient_sync()
# zero2.step()
# ```
#
# You have all the pieces. In `__init__`:
#
# - Broadcast the module's parameters and buffers with lab 02's `broadcast_state(module, group)`.
# - Build `self.buckets`, one `ShardedBucket` for each list that lab 03's `assign_buckets` returns. They are launched in
#   this order, so each bucket's `previous` is the one before it.
# - Let lab 04's `GradientSync(buckets)`, as `self.sync`, pack and launch them during backward.
#
# `self.optimizer` is given. It is lab 07's `ShardedOptimizer` on the buckets' flat parameters, and needs each
# `shard.grad` to hold the mean gradient. Then write `finish_gradient_sync()`, `step()` and `zero_grad()`; leave
# `clip_grad_norm_()` for 8.3. For now, they only have to work in the loop above.
#
# Target: at any moment of backward, a rank holds at most its shards of the gradients and three buckets.
#
# <details><summary>Hint</summary>Each of the three methods is one line here. Which object finishes, which one steps,
# and which one knows all gradients?</details>


# %% tags=["export"]
# %%ranks
def flat_parameters_of(
    buckets: list[ShardedBucket], parameters: list[nn.Parameter]
) -> list[FlatParameter]:
    """Return the flat parameters of the buckets, which hold all parameters of ZeRO2's only param group."""
    return [bucket.flat_parameter for bucket in buckets]


# %% tags=["exercise", "export"] grade_id="zero2"
# %%ranks
class ZeRO2(nn.Module):
    """ZeRO stage 2: gradients are reduce-scattered and freed while backward computes; the optimizer state is sharded.

    `.optimizer` is the sharded optimizer, for schedulers and state dicts.

    Memory: with Adam in fp32, 4Ψ + 4Ψ/N + 8Ψ/N bytes for Ψ parameters on N ranks; during backward up to 3 + 2/N buckets
        more, and the gradient being computed. Inside no_sync(), full gradients of 4Ψ bytes.
    Communication: per backward outside no_sync(), one reduce-scatter per bucket; per step, one all-gather per bucket.
        With g micro-batches, (g+1)(N−1)/N · 4Ψ bytes sent per rank; with no_sync(), 2(N−1)/N · 4Ψ.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.2 and §7.
    """

    def __init__(
        self, module: nn.Module, optimizer_cls, bucket_cap_mb: float = 25.0, group=None, **defaults
    ):
        super().__init__()
        self.module = module
        ### BEGIN SOLUTION
        broadcast_state(module, group)
        assigned = assign_buckets(module.parameters(), bucket_cap_mb)
        self.buckets = [ShardedBucket(FlatParameter(parameters, group)) for parameters in assigned]
        for previous, bucket in pairwise(self.buckets):
            bucket.previous = previous
        self.sync = GradientSync(self.buckets)
        ### END SOLUTION
        flatten = partial(flat_parameters_of, self.buckets)  # deepcopy copies what a partial holds
        self.optimizer = ShardedOptimizer(
            module.parameters(), optimizer_cls, flatten, group, **defaults
        )
        self.synced = (
            False  # whether finish_gradient_sync() has run since the last zero_grad() or step()
        )

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def no_sync(self):
        """Let full gradients accumulate on this rank, without communication."""
        return self.sync.no_sync()


# %% tags=["exercise", "export"] grade_id="zero2-2"
# %%ranks
class ZeRO2(ZeRO2):
    def finish_gradient_sync(self) -> None:
        """Wait until this rank has its shard of every mean gradient; inside no_sync(), do nothing."""
        ### BEGIN SOLUTION
        self.sync.finish()
        self.synced = self.sync.enabled
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
        """Update this rank's shard of the parameters and all-gather the others."""
        ### BEGIN SOLUTION
        self._finish_unless_synced()
        self.optimizer.step()
        self.synced = False
        ### END SOLUTION

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        ### BEGIN SOLUTION
        self.synced = False
        self.optimizer.zero_grad()

    def _finish_unless_synced(self) -> None:
        # A rank that ran no backward() since zero_grad() must take part, too: do not decide by its gradients.
        if not self.synced or self.sync.pending:
            self.finish_gradient_sync()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-zero2" points=3
check.ZeRO2()

# %% [markdown]
# ## Exercise 8.3 · Every training loop (15 min, 2 points)
#
# Training loops accumulate gradients, clip them, skip steps, and forget `finish_gradient_sync()`. Go back to your
# class, and make all of these work:
#
# - `clip_grad_norm_(max_norm)` clips with the optimizer's method of that name.
# - `step()` and `clip_grad_norm_()` finish the synchronization themselves, unless that has been done since the last
#   `zero_grad()`, `step()` and `backward()`. `self.synced` is there for that, and `self.sync.pending` is True from the
#   first gradient of a backward until `finish()`.
# - A rank that ran no `backward()` since `zero_grad()` must take part in the synchronization, or the others wait for it
#   forever. So before the first synchronization, the decision must not depend on gradients. After it, either all ranks
#   run another `backward()` or none does. The caller is responsible for that.
# - Inside `no_sync()`, `finish_gradient_sync()` does nothing, so nothing is synchronized after it.
# - There are two ways to train on several micro-batches. Inside `no_sync()`, full gradients accumulate, and the last
#   backward sends them once. Or each `backward()` is followed by `finish_gradient_sync()`: then a rank holds little,
#   but the gradients of every micro-batch are reduced. Both must give the same gradients.
#
# Your pieces do two things already: a second `backward()` before `finish_gradient_sync()` raises an error, and a deep
# copy of the wrapper works.
#
# Target: no reduce-scatter is repeated. Clipping sends one more element.
#
# <details><summary>Hint</summary>List the calls after which the gradients differ from those that were synchronized
# last. Which of these calls change <code>self.synced</code>, and which change <code>self.sync.pending</code>?</details>

# %% tags=["check"] grade_id="check-zero2-loops" points=2
check.every_loop()

# %% [markdown]
# ## Break it: all-reduce, and keep a slice
#
# Some published code calls this ZeRO-2: all-reduce the bucket, then keep this rank's shard and free the rest.


# %%
# %%ranks
class AllReduceInFlight:
    """An all-reduce in flight, of which wait() returns this rank's shard."""

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
# **Predict.** Which of these differ from yours: the losses, the bytes sent, the gradients held after
# `finish_gradient_sync()`?

# %%
prediction_what_differs = ""  # <- what do you expect?

# %% [markdown]
# ## Your figure, and torch's answer
#
# Your wrapper and the one that slices train beside a plain AdamW under torch's DDP, your `ZeRO1`, and torch's FSDP2.
# With `reshard_after_forward=False`, FSDP2 keeps unsharded parameters until backward has used them, which is the
# nearest that torch has to ZeRO-2. Mismatch detection is switched off, because it sends messages of its own.

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


def in_ddp():
    model = DistributedDataParallel(new_model(), gradient_as_bucket_view=True)
    return model, adamw(model.parameters(), **settings)


def in_fsdp2():
    model, mesh = new_model(), init_device_mesh(device.type, (world_size,))
    for submodule in (*model.blocks, model):
        fully_shard(submodule, mesh=mesh, reshard_after_forward=False)
    return model, adamw(model.parameters(), **settings)


def in_zero2(wrap):
    model = wrap(new_model(), adamw, bucket_cap_mb=0.25, **settings)
    return model, model


# %%
# %%ranks
def finish(optimizer):
    """Synchronize the gradients of ZeRO1 or ZeRO2. DDP and FSDP2 have done so in backward()."""
    for name in ("reduce_gradients", "finish_gradient_sync"):
        getattr(optimizer, name, lambda: None)()


def steps_of(model, optimizer, steps=4):
    """Train, and return the last loss, the last step's ledger and held memory, and the memory over one more step."""
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
alone = new_model()
results = {
    "DDP, AdamW": steps_of(*in_ddp()),
    "your ZeRO1": steps_of(alone, ZeRO1(alone.parameters(), adamw, **settings)),
    "all-reduce, then slice": steps_of(*in_zero2(all_reducing_zero2)),
    "your ZeRO2": steps_of(*in_zero2(ZeRO2)),
    "FSDP2, kept": steps_of(*in_fsdp2()),
}

# %% tags=["nbval-ignore-output"]
from shared import plots, tables

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
tables.Table(["", "loss", "messages", "must send", "gradients", "peak"], rows, note)

# %% [markdown]
# Slicing gives the right losses and holds no more than yours, but a third of the bytes that it sends are useless.
# (Between steps, FSDP2 holds only its shards of the parameters. Chapter 09 builds that.) The next figure shows when a
# rank holds gradients in a step of your wrapper:

# %% tags=["nbval-ignore-output"]
plots.memory_over_step(results["your ZeRO2"][-1].samples)

# %% [markdown]
# Buckets are allocated and freed while the activations shrink, and a quarter of the gradients remains. The parameters
# are the largest component now, and all four ranks hold all of them. Chapter 09 shards them, too.

# %%
ranks.stop()
