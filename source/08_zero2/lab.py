# ---
# jupyter:
#   course:
#     module: zero2
#     minutes: 75
# ---

# %% [markdown]
# # Lab 08 · ZeRO-2
#
# **75 minutes, 11 points.** You build `ZeRO2`: the buckets of lab 04, of whose sum each rank keeps its own part only,
# and the sharded optimizer of lab 07. A gradient lives from the moment backward makes it until its bucket has left.
#
# Each exercise has a check. Times are never judged; bytes are, at every moment of a backward.

# %% tags=["nbval-ignore-output"]
from shared import ranks
from shared.checks import zero2 as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""ZeRO stage 2: each rank holds all parameters, and one N-th of the gradients and of the optimizer's state."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from shared.c10d import reduce_scatter_single
from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import FlatParameters, Messages, ZeRO1, goes_by_hand

# %% [markdown]
# ## Exercise 8.1 · A reduce-scatter under way (15 min, 2 points)
#
# Lab 07's `reduce_scatter_` came back when all was done. To send while backward computes, it must come back at once:
#
# `begin_reduce_scatter(flat, group)` launches, and gives back a function; called, it waits, and gives back this
# rank's part of the sum, which may be a view of flat.
#
# With NCCL that is `reduce_scatter_single(own, flat, group=group, async_op=True)`. On gloo, where
# `goes_by_hand(flat, group)`, let every rank send each other one its part directly, all at once: lab 07's
# `Messages(sends, receives, group)` does that, and has `wait()`.
# Both are lists of pairs (tensor, peer), the peer's number within the group. Then there are N parts to add up, this
# rank's own among them.
#
# Target: (N−1)/N of flat's bytes sent, and besides `flat`, which is used up, room for (N−1)/N of it. (The check
# counts what must be sent. That gloo's own reduce-scatter carries twice as much, as the lesson has measured, it does
# not see.)


# %% tags=["exercise", "export"] grade_id="begin-reduce-scatter"
# %%ranks
def begin_reduce_scatter(
    flat: torch.Tensor, group: dist.ProcessGroup | None = None
) -> Callable[[], torch.Tensor]:
    """Begin to add flat up over the group's N ranks. → a function that waits, and gives back this rank's N-th

    Shapes: flat: [N · n], used up → [n]
    Comm: a reduce_scatter, by hand on gloo; (N−1)/N of flat's bytes sent per rank.
    """
    ### BEGIN SOLUTION
    rank, parts = dist.get_rank(group), flat.view(dist.get_world_size(group), -1)
    own = parts[rank]
    if not goes_by_hand(flat, group):
        handle, arrived = reduce_scatter_single(own, flat, group=group, async_op=True), []
    else:
        others = [peer for peer in range(len(parts)) if peer != rank]
        arrived = torch.empty_like(parts[1:])
        receives = list(zip(arrived, others, strict=True))
        handle = Messages([(parts[peer], peer) for peer in others], receives, group)

    def finish() -> torch.Tensor:
        handle.wait()
        return sum(arrived, start=own) if len(arrived) else own.clone()  # a view keeps flat alive

    return finish
    ### END SOLUTION


# %% tags=["check"] grade_id="check-begin-reduce-scatter" points=2
check.begin_reduce_scatter()

# %% [markdown]
# ## Exercise 8.2 · A bucket that lets go (20 min, 4 points)
#
# `TravellingGradients(home)` holds the gradients of the parameters in `home` (lab 07's `FlatParameters`), but only
# while they are on their way:
#
# | | does | holds |
# |---|---|---|
# | `pack(place)` | moves a gradient into a flat tensor, made for the first to come; `.grad` becomes None | a bucket |
# | `launch()` | waits for the bucket `before`, then begins the reduce-scatter of this one | a bucket, and what comes |
# | `wait()` | adds this rank's part of the mean to `home.shard.grad`, lets the flat tensor go | one N-th |
#
# - `before` is the bucket that is launched before this one. Without waiting for it, all buckets could be alive at once.
# - `wait()` when nothing is under way does nothing.
# - A gradient of None counts as zeros, also where all are None. One that is part of a graph is refused, as by lab 03's
#   `Bucket`, with a RuntimeError that names `create_graph`.
# - The mean in `home.shard.grad` must not be a view of the flat tensor: the whole of that would stay alive.
# - Others read four attributes: `home`; `parameters`, those of home; `flat`, None while there is none; `finish`, what
#   `begin_reduce_scatter` gave, None while nothing is under way.
# - Several backwards may come before a step. Each sends its gradients, and they add up in `home.shard.grad`, in the
#   shard's dtype, which in lab 09 may be another than theirs.


# %% tags=["exercise", "export"] grade_id="travelling-gradients"
# %%ranks
class TravellingGradients:
    """The gradients of home's parameters, kept whole only until their sum is sent."""

    before = None  # what is launched before this

    def __init__(self, home: FlatParameters):
        ### BEGIN SOLUTION
        self.home, self.parameters = home, home.parameters
        self.world_size = dist.get_world_size(home.group)
        self.flat = self.slices = self.finish = None
        ### END SOLUTION

    def pack(self, place: int) -> None:
        """Take the gradient of parameters[place] away; None counts as zeros.

        Raises: RuntimeError for a gradient that is itself differentiable.
        """
        ### BEGIN SOLUTION
        if self.flat is None:
            self.flat = self.home.new_flat()
            self.slices = self.home.slices_of(self.flat)
        gradient, self.parameters[place].grad = self.parameters[place].grad, None
        if gradient is None:
            return
        if gradient.requires_grad:
            raise RuntimeError("create_graph=True: messages have no graph; use the module itself")
        torch.div(gradient, self.world_size, out=self.slices[place])
        ### END SOLUTION

    def launch(self) -> None:
        """Begin to send the sum, when that of `before` has arrived. Comm: one reduce_scatter."""
        ### BEGIN SOLUTION
        if self.before is not None:
            self.before.wait()
        self.finish = begin_reduce_scatter(self.flat, self.home.group)
        ### END SOLUTION

    def wait(self) -> None:
        """Add the mean to the shard's gradient, if it is under way, and let the rest go."""
        ### BEGIN SOLUTION
        if self.finish is not None:
            shard, mean = self.home.shard, self.finish().to(self.home.shard.dtype)
            shard.grad = mean if shard.grad is None else shard.grad.add_(mean)
            self.flat = self.slices = self.finish = None
        ### END SOLUTION


# %% tags=["check"] grade_id="check-travelling-gradients" points=4
check.TravellingGradients()

# %% [markdown]
# Two adapters, given: how your bucket answers the optimizer of lab 07, which knows `reset`, `reduce` and `still_there`
# from `FlatGradients`; and that optimizer, on buckets. By the time of a step nothing is left to reduce, and nothing of
# the last step is still there.


# %% tags=["export"]
# %%ranks
class ShardedBucket(TravellingGradients):
    """A bucket as lab 04's queue and lab 07's optimizer know it."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        super().__init__(FlatParameters(parameters, group))

    def reset(self) -> None:
        self.home.shard.grad = None
        for parameter in self.parameters:
            parameter.grad = None  # what no_sync() has kept

    def reduce(self) -> None:
        pass

    def still_there(self) -> bool:
        return False


class BucketOptimizer(ZeRO1):
    """ZeRO1 over buckets that somebody else has laid out, and fills."""

    def __init__(
        self, buckets: list[ShardedBucket], params, optimizer_cls: type, group, **defaults
    ):
        self.buckets = buckets
        super().__init__(params, optimizer_cls, group, **defaults)

    def _lay_out(self, parameters: list[nn.Parameter]) -> list[ShardedBucket]:
        return self.buckets


# %% [markdown]
# ## Exercise 8.3 · The wrapper (30 min, 5 points)
#
# `ZeRO2(module, optimizer_cls, bucket_cap_mb=25.0, group=None, **defaults)` is `OverlappedDDP` with buckets of your
# kind, and with an optimizer. Lab 04's `__init__` broadcasts and builds the buckets, with
# `self.bucket_type(parameters, group)`; `self.buckets` has them in the order in which they are launched. Lab 04's hooks
# call `_on_gradient` for each gradient, also inside `no_sync()`, where `self.syncs` is False.
#
# ```python
# zero2.zero_grad()
# zero2(inputs).backward()           # buckets leave while backward computes
# zero2.finish_gradient_sync()
# zero2.step()
# ```
# - `step()` and `clip_grad_norm_(max_norm)`, which is lab 07's, finish the synchronisation themselves where that was
#   not done since the last `zero_grad()` and the last `backward()`. Keep a flag.
# - What the flag depends on must be the same on all ranks. One without a `backward()` since `zero_grad()` must
#   synchronise too. That after `finish_gradient_sync()` either all run another `backward()` or none does, is the
#   caller's business.
# - `finish_gradient_sync()` inside `no_sync()` sends nothing, as in lab 04, so it settles nothing.
# - `zero_grad()` sends nothing either, so it cannot call back what is under way. After a `backward()` that was not
#   finished, call `finish_gradient_sync()` before: otherwise the next `backward()` is refused, as in lab 04.
# - With more than one micro-batch there is a choice. `no_sync()` keeps whole gradients until the last one, and sends
#   them once. Or each `backward()` is followed by `finish_gradient_sync()`: what is kept stays small, and every
#   micro-batch sends. Both must give the same gradients.
#
# Target: at any moment of backward, no more than Ψ/N gradients, and three buckets.


# %% [markdown]
# Two cells. The first knows of buckets and messages: here each bucket learns which one is launched `before` it, and
# the flag is kept. The second knows of the optimizer.


# %% tags=["exercise", "export"] grade_id="syncs-once"
# %%ranks
class SyncsOnce(OverlappedDDP):
    """Overlap over sharded buckets, of which one at a time is launched; knows whether a step may begin."""

    bucket_type = ShardedBucket

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0, group=None):
        ### BEGIN SOLUTION
        super().__init__(module, bucket_cap_mb, group)
        self.synced = False  # since the last gradient, the last zero_grad() and the last step()
        for before, bucket in pairwise(self.buckets):
            bucket.before = before
        ### END SOLUTION

    def finish_gradient_sync(self) -> None:
        """Wait until this rank has its part of every mean gradient."""
        ### BEGIN SOLUTION
        super().finish_gradient_sync()
        self.synced = self.syncs
        ### END SOLUTION

    def finish_once(self) -> None:
        """Synchronise, unless that is done."""
        ### BEGIN SOLUTION
        if not self.synced:
            self.finish_gradient_sync()
        ### END SOLUTION

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        ### BEGIN SOLUTION
        self.synced = False
        super()._on_gradient(parameter)
        ### END SOLUTION


# %% tags=["exercise", "export"] grade_id="zero2"
# %%ranks
class ZeRO2(SyncsOnce):
    """ZeRO stage 2: gradients are reduce-scattered while backward computes, and freed; the optimizer is sharded.

    `.optimizer` is the sharded optimizer, for schedulers and its state_dict().

    Memory: with Adam in fp32, 4Ψ + 4Ψ/N + 8Ψ/N bytes for Ψ parameters on N ranks; in backward up to 3 + 2/N
    buckets more and the gradient that comes; no_sync() keeps whole gradients, 4Ψ.
    Comm: per backward outside no_sync(), one reduce_scatter per bucket; per step, one all_gather per bucket. With g
    micro-batches (g+1)(N−1)/N · 4Ψ bytes, with no_sync() 2(N−1)/N · 4Ψ.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.2 and §7.
    """

    def __init__(
        self, module: nn.Module, optimizer_cls, bucket_cap_mb: float = 25.0, group=None, **defaults
    ):
        ### BEGIN SOLUTION
        super().__init__(module, bucket_cap_mb, group)
        parameters = module.parameters()
        self.optimizer = BucketOptimizer(self.buckets, parameters, optimizer_cls, group, **defaults)
        ### END SOLUTION

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most max_norm. → the norm before"""
        ### BEGIN SOLUTION
        self.finish_once()
        return self.optimizer.clip_grad_norm_(max_norm)
        ### END SOLUTION

    def step(self) -> None:
        """Update this rank's part of the parameters, and collect the others'."""
        ### BEGIN SOLUTION
        self.finish_once()
        self.optimizer.step()
        self.synced = False
        ### END SOLUTION

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        ### BEGIN SOLUTION
        self.synced = False
        self.optimizer.zero_grad()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-zero2" points=5
check.ZeRO2()

# %% [markdown]
# ## Break it: all-reduce, and keep a slice
#
# Code in circulation calls this ZeRO-2: all-reduce the bucket, then keep one's own part and let the rest go.


# %%
# %%ranks
class AllReducingBucket(ShardedBucket):
    def launch(self):
        if self.before is not None:
            self.before.wait()
        handle = dist.all_reduce(self.flat, group=self.home.group, async_op=True)
        flat = self.flat

        def finish():
            handle.wait()
            return self.home.own(flat).clone()

        self.finish = finish


class AllReducingZeRO2(ZeRO2):
    bucket_type = AllReducingBucket


# %% [markdown]
# **Predict.** Which of these differ from yours: the losses, the bytes sent, the gradients kept after
# `finish_gradient_sync()`?

# %%
prediction_what_differs = ""  # <- what do you expect?

# %% [markdown]
# ## Your figure, and torch's answer
#
# Yours and the one that slices train beside a plain AdamW under torch's DDP, beside your `ZeRO1`, and beside torch's
# FSDP2. That one with `reshard_after_forward=False`, which keeps gathered parameters until backward has used them, is
# the nearest that torch has to ZeRO-2. Ranks compare notes no more: that costs messages.

# %%
# %%ranks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shared import memory, wire
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch
from solutions.manual_ddp import broadcast_state

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
    model = new_model()
    for each in (*model.blocks, model):
        fully_shard(each, reshard_after_forward=False)
    return model, adamw(model.parameters(), **settings)


def in_zero2(kind):
    model = kind(new_model(), adamw, bucket_cap_mb=0.25, **settings)
    return model, model


# %%
# %%ranks
def finish(optimizer):
    for name in ("reduce_gradients", "finish_gradient_sync"):  # of ZeRO1, of ZeRO2
        getattr(optimizer, name, lambda: None)()


def steps_of(model, optimizer, steps=4):
    """→ last loss, ledger of the last step, what is held before it steps, memory at the peak of one more"""
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
    "all-reduce, then slice": steps_of(*in_zero2(AllReducingZeRO2)),
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
    "Rank 0, one step, in MB; gradients: kept for the step. "
    "On gloo a collective of ours is 3 sends and 3 receives."
)
tables.Table(["", "loss", "messages", "must send", "gradients", "peak"], rows, note)

# %% [markdown]
# Slicing gives the right losses and keeps no more than yours, but a third of its bytes were for nothing. (FSDP2
# between steps holds its part of the parameters only: that is chapter 09.) And when are gradients there? Your own step:

# %% tags=["nbval-ignore-output"]
plots.memory_over_step(results["your ZeRO2"][-1].samples)

# %% [markdown]
# Buckets come and go while the activations shrink; a quarter of the gradients stays. The parameters are now the largest
# part, and all four ranks hold all of them. Chapter 09 lets go of them, too.

# %%
ranks.stop()
