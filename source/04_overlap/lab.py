# ---
# jupyter:
#   course:
#     module: overlapped_ddp
#     minutes: 60
# ---

# %% [markdown]
# # Lab 04 · Overlap
#
# **60 minutes, 10 points.** You build `OverlappedDDP`. It uses the buckets of lab 03, but it launches each of them
# while backward is still computing the rest. Autograd tells your code about finished gradients through hooks. A wrong
# hook raises no error, so you will first look at two of them.
#
# Each exercise has a check. The checks never judge times, but they do judge the order of events.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks
from shared.checks import overlapped_ddp as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Data parallelism with overlap: each bucket's all-reduce starts while backward still computes."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from solutions.bucketed_ddp import Bucket, assign_buckets
from solutions.manual_ddp import broadcast_state

# %% [markdown]
# The code of this lab needs only four members of a bucket. The next cell declares them as a **protocol**: any class
# with these members will do. Your `Bucket` of lab 03 has them, and so will the buckets that you build in lab 08.


# %% tags=["export"]
# %%ranks
class GradientBucket(Protocol):
    """What a launch queue needs of a bucket. Chapter 03's Bucket has it, and so has the ShardedBucket of chapter 08."""

    parameters: list[nn.Parameter]

    def pack(self, index: int) -> None:
        """Copy the gradient of parameters[index] into the flat tensor; None counts as zeros."""

    def launch(self) -> None:
        """Launch the collective that averages the flat tensor, and return at once."""

    def wait(self) -> None:
        """Wait until the collective is complete."""


# %% [markdown]
# ## Exercise 4.1 · Launch in one order (15 min, 2 points)
#
# All ranks must launch their collectives in the same order. But the order in which gradients become ready may depend on
# the samples of a rank. So the buckets wait in a queue: a bucket is launched when it is full *and all buckets before it
# have been launched*.
#
# `LaunchQueue(buckets)` keeps `missing`, a list with one set per bucket: the indices of the gradients that are not
# packed yet. It also keeps `launched`, the number of buckets launched so far.
#
# - `add(bucket_index, index)` packs gradient `index` of bucket `bucket_index`. Then it launches every bucket that is
#   full and next. It does not wait.
# - `finish()` packs every gradient that is still missing. (Backward has computed none, so `pack` counts it as zeros.)
#   It launches the remaining buckets, and only then waits for all buckets. Afterwards the queue is ready for the next
#   backward.
#
# ```python
# # buckets of 1, 2 and 1 gradients      launched so far
# queue.add(2, 0)                        # none: bucket 0 is not full
# queue.add(1, 1)                        # none
# queue.add(0, 0)                        # 0
# queue.add(1, 0)                        # 0, 1, 2
# ```
#
# Target: every bucket is packed completely, launched once, in order, and waited for once.
#
# <details><summary>Hint</summary>
#
# One `add` may complete a bucket that several full buckets were waiting for. Which loop launches all of them, and where
# does it stop?
# </details>


# %% tags=["exercise", "export"] grade_id="launch-queue"
# %%ranks
class LaunchQueue:
    """Launches buckets in a fixed order, the same on every rank, each as soon as it is full and next.

    `missing[bucket_index]` holds the indices of the gradients that are not packed yet. `launched` is the number of
    buckets launched so far.
    """

    def __init__(self, buckets: Sequence[GradientBucket]):
        ### BEGIN SOLUTION
        self.buckets = buckets
        self._begin()
        ### END SOLUTION

    def add(self, bucket_index: int, index: int) -> None:
        """Pack a gradient that is ready, and launch every bucket that is full and next.

        Communication: one collective per bucket launched.
        """
        ### BEGIN SOLUTION
        self.buckets[bucket_index].pack(index)
        self.missing[bucket_index].remove(index)
        while self.launched < len(self.buckets) and not self.missing[self.launched]:
            self.buckets[self.launched].launch()
            self.launched += 1
        ### END SOLUTION

    def finish(self) -> None:
        """Launch the remaining buckets, wait for all of them, and get ready for the next backward."""
        ### BEGIN SOLUTION
        for bucket_index, indices in enumerate(self.missing):
            for index in sorted(indices):
                self.add(bucket_index, index)
        for bucket in self.buckets:
            bucket.wait()
        self._begin()

    def _begin(self) -> None:
        self.missing = [set(range(len(bucket.parameters))) for bucket in self.buckets]
        self.launched = 0
        ### END SOLUTION


# %% tags=["check"] grade_id="check-launch-queue" points=2
check.LaunchQueue()

# %% [markdown]
# ## Exercise 4.2 · Launch during backward (20 min, 3 points)
#
# Something must call `add` while backward computes. A **hook** is a function that you register and autograd calls. Two
# kinds of hook look right for this, and both have been published in code that trains:


# %%
# %%ranks
def average(tensor):
    tensor /= world_size
    dist.all_reduce(tensor)


def hooked(register):
    """Run two micro-batches and average gradients in the second. Returns the parameter and its gradient."""
    weight = nn.Parameter(torch.ones(1, device=device))
    (weight * (rank + 1)).sum().backward()  # without the hook: one all-reduce is enough for both
    getattr(weight, register)(average)
    (weight * 10 * (rank + 1)).sum().backward()
    return weight.item(), weight.grad.item()


# %% [markdown]
# The gradients of rank r are r + 1 and 10 (r + 1). The mean of their sum is 27.5 on every rank, and the parameter
# should stay 1. **Predict** the parameter and its gradient for each of the two hooks, on ranks 0 and 3.

# %%
# %%ranks
parameter, gradient = hooked("register_post_accumulate_grad_hook")
print(f"post-accumulate hook: parameter {parameter:.1f}, gradient {gradient:.1f}")

# %%
# %%ranks
parameter, gradient = hooked("register_hook")
print(f"hook on the tensor: parameter {parameter:.1f}, gradient {gradient:.1f}")

# %% [markdown]
# Neither raises an error, and both leave gradients that differ between ranks.
#
# - A post-accumulate hook receives the *parameter*. `average` averaged the parameter, which is the same on all ranks,
#   so nothing seemed to happen.
# - A hook on the tensor receives the gradient of this backward *before* it is added to `.grad`. The first micro-batch
#   was never averaged.
#
# So we use post-accumulate hooks and read `parameter.grad` ourselves. Autograd calls such a hook once per backward,
# when `.grad` is complete. It calls the hook of a tied parameter once, too.
#
# `watch_gradients` is given. It registers a hook on each parameter of the buckets, and translates the parameter into
# the two indices that `add` takes. Its weak reference and its clean-up keep a deleted wrapper from living on in its own
# hooks; you need not follow them now.


# %% tags=["export"]
# %%ranks
def watch_gradients(
    buckets: Sequence[GradientBucket], on_gradient: Callable[[int, int], None]
) -> None:
    """Call the method on_gradient(bucket_index, index) whenever backward() has completed a gradient of a bucket.

    The hooks hold the method's object by a weak reference, because a strong one would keep it alive through its own
    hooks. They are removed when the object is gone.
    """
    method = weakref.WeakMethod(on_gradient)
    index_of = {
        id(parameter): (bucket_index, index)
        for bucket_index, bucket in enumerate(buckets)
        for index, parameter in enumerate(bucket.parameters)
    }
    hooks = contextlib.ExitStack()
    for bucket in buckets:
        for parameter in bucket.parameters:
            handle = parameter.register_post_accumulate_grad_hook(
                lambda completed: method()(*index_of[id(completed)])
            )
            hooks.callback(handle.remove)
    weakref.finalize(on_gradient.__self__, hooks.close)


# %% [markdown]
# `GradientSync(buckets)` connects the hooks with the queue. Write two of its methods. (The third, `no_sync`, is
# exercise 4.4. `__setstate__` is given: it gives hooks of its own to a copy made by `deepcopy`.)
#
# - `on_gradient(bucket_index, index)` is called in backward, whenever a gradient is complete. It adds the gradient to
#   the queue.
# - `finish()` finishes the queue.
# - While `enabled` is False, gradients accumulate: `on_gradient` adds nothing to the queue, and `finish` does nothing.
# - `pending` is True from the first gradient until the next `finish` that does something. Lab 08 reads it.
# - Calling `backward()` a second time before `finish()` is a mistake: the new gradient would be added to a bucket that
#   may be in flight. `on_gradient` must raise a `RuntimeError` then, whether `enabled` or not. Its message says what to
#   do instead: call `finish_gradient_sync()` after each `backward()`, or use `no_sync()`.
#
# Target: each gradient is added once, in the backward that completes it, and nothing waits during backward.
#
# <details><summary>Hint 1: how do I recognize a second gradient?</summary>
#
# The queue knows which gradients it is still missing. Is this one of them?
# </details>
# <details><summary>Hint 2: who does the rest?</summary>
#
# `GradientSync` does not pack, launch or wait itself. Each of these methods calls one method of the queue.
# </details>


# %% tags=["exercise", "export"] grade_id="gradient-sync"
# %%ranks
class GradientSync:
    """Launches the collectives of buckets while backward computes, and waits for them at the end.

    `enabled` is False inside no_sync(); `pending` is True from the first gradient until finish().
    """

    def __init__(self, buckets: Sequence[GradientBucket]):
        self.queue, self.enabled, self.pending = LaunchQueue(buckets), True, False
        watch_gradients(buckets, self.on_gradient)

    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Add a gradient that backward() has just completed to the queue. A second one raises RuntimeError."""
        ### BEGIN SOLUTION
        if index not in self.queue.missing[bucket_index]:
            raise RuntimeError(
                "got a second gradient for this parameter: call finish_gradient_sync() after each "
                "backward(), or let gradients accumulate inside no_sync()"
            )
        self.pending = True
        if self.enabled:
            self.queue.add(bucket_index, index)
        ### END SOLUTION

    def finish(self) -> None:
        """Launch the remaining buckets and wait until every gradient is averaged; inside no_sync(), do nothing."""
        ### BEGIN SOLUTION
        if self.enabled:
            self.queue.finish()
            self.pending = False
        ### END SOLUTION

    @contextlib.contextmanager
    def no_sync(self):
        """Let gradients accumulate on this rank, without communication."""
        ### BEGIN SOLUTION
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled
        ### END SOLUTION

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        watch_gradients(self.queue.buckets, self.on_gradient)  # deepcopy does not copy hooks


# %% tags=["check"] grade_id="check-gradient-sync" points=3
check.GradientSync()

# %% [markdown]
# ## Exercise 4.3 · The wrapper (10 min, 3 points)
#
# `OverlappedDDP(module, bucket_cap_mb=25.0, group=None)` is used like `BucketedDDP`, and consists of pieces that you
# have:
#
# - When built, it broadcasts the state of `module` with `broadcast_state`, splits the parameters with `assign_buckets`,
#   makes a `Bucket` of each list, and a `GradientSync` of the buckets.
# - `finish_gradient_sync()` returns when every gradient is the mean over the ranks. The given `with record_function(…)`
#   labels this phase in a profiler's trace.
#
# Target: a full bucket whose turn has come is launched before backward goes on, nothing waits inside backward, and
# there is only one copy of the gradients, the one in the buckets. All ranks launch all buckets in the same order, even
# if a parameter is unused on one rank.
#
# The check begins with a plain model on two ranks. Then it tries tied, frozen and unused parameters, copies made by
# `deepcopy`, and wrappers that were deleted.
#
# <details><summary>Hint</summary>
#
# `BucketedDDP.__init__` of lab 03 is almost right. What else does this wrapper make from the buckets?
# </details>


# %% tags=["exercise", "export"] grade_id="overlapped-ddp"
# %%ranks
class OverlappedDDP(nn.Module):
    """Train a replica of module on each rank of the group, and average gradients while backward computes.

    Call finish_gradient_sync() after backward() and before the optimizer's step. `.module` is the module itself.

    Communication: when built, one broadcast per parameter and buffer; per step, one all-reduce per bucket.
    Raises:
        RuntimeError: in backward(), for a second gradient before finish_gradient_sync().
    """

    def __init__(
        self, module: nn.Module, bucket_cap_mb: float = 25.0, group: dist.ProcessGroup | None = None
    ):
        super().__init__()
        self.module = module
        ### BEGIN SOLUTION
        broadcast_state(module, group)
        assigned = assign_buckets(module.parameters(), bucket_cap_mb)
        self.buckets = [Bucket(parameters, group) for parameters in assigned]
        self.sync = GradientSync(self.buckets)
        ### END SOLUTION

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Wait until every gradient is the mean over the ranks."""
        with record_function("OverlappedDDP::finish_gradient_sync"):
            ### BEGIN SOLUTION
            self.sync.finish()
            ### END SOLUTION

    def no_sync(self):
        """Let gradients accumulate on this rank, without communication."""
        return self.sync.no_sync()


# %% tags=["check"] grade_id="check-overlapped-ddp" points=3
check.OverlappedDDP()

# %% [markdown]
# ## Exercise 4.4 · Communicate for the last micro-batch only (10 min, 2 points)
#
# When you accumulate gradients, only their sum needs to be averaged:
#
# ```python
# with model.no_sync():
#     for micro_batch in micro_batches[:-1]:
#         loss_of(model, micro_batch).backward()      # accumulates, sends nothing
# loss_of(model, micro_batches[-1]).backward()        # sends the sum
# model.finish_gradient_sync()
# ```
#
# Write `GradientSync.no_sync`, in the cell above, and run the cells of both classes again.
#
# - Inside `no_sync()`, nothing is sent, not even by `finish_gradient_sync()`.
# - It can be nested. The inner `no_sync()` ends without enabling communication for the outer one.
# - If an exception leaves the `with` block, even a `KeyboardInterrupt`, the wrapper is as it was before the block.
#
# <details><summary>Hint: an exception comes out of yield</summary>
#
# `contextlib.contextmanager` raises the block's exception at your `yield`. Which of your lines does Python run after
# that?
# </details>

# %% tags=["check"] grade_id="check-no-sync" points=2
check.no_sync()

# %% [markdown]
# ## Your figure (5 min)
#
# Let your wrapper train a GPT of 2.7 million parameters, beside the one of lab 03. New ranks would not know your class,
# so you use the same ranks, and *emulate* a link of 1 Gbit/s. (With NCCL, they use their own links.) Mismatch detection
# is switched off, because it costs time.


# %%
# %%ranks
from shared import timeline, wire
from shared.data import CharTokens
from shared.hosts import emulated
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch
from solutions.bucketed_ddp import BucketedDDP

mismatch.ignore()
link = contextlib.ExitStack()
if dist.get_backend() == "gloo":
    link.enter_context(emulated.link("1gbit", latency_ms=0.1))

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
samples = text.windows(range(1000 * rank, 1000 * rank + 600, 100), length=64)
inputs, targets = (tensor.to(device) for tensor in samples)


# %%
# %%ranks
def trained(wrapper, steps=4):
    """Train a new model, and return the loss, the timeline and the ledger of the last step."""
    model = wrapper(TinyGPT(config).to(device), bucket_cap_mb=2.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        dist.barrier()
        with wire.ledger() as log, timeline.record(model, optimizer) as line:
            loss = model(inputs, targets)
            loss.backward()
            model.finish_gradient_sync()
            optimizer.step()
    return loss.item(), line, log


results = [trained(wrapper) for wrapper in (BucketedDDP, OverlappedDDP)]

# %% [markdown]
# This is the last step of rank 0 with `BucketedDDP`. All of its all-reduces come after backward:

# %% tags=["nbval-ignore-output"]
(loss_before, line_before, log_before), (loss, line, log) = ranks.pull("results")[0]
assert line_before.overlap < 0.1
plots.timeline([line_before])

# %% [markdown]
# And this is yours, with the same buckets, the same bytes and the same loss:

# %% tags=["nbval-ignore-output"]
assert all(entry.in_backward for entry in log.entries)
assert log.payload_bytes == log_before.payload_bytes and abs(loss - loss_before) < 1e-3
plots.timeline([line])

# %% [markdown]
# In lab 05, you measure how much shorter a step gets, beside torch's DDP.

# %%
ranks.stop()
