# ---
# jupyter:
#   course:
#     module: overlapped_ddp
#     minutes: 80
# ---

# %% [markdown]
# # Lab 04 · Overlap
#
# **80 minutes, 9 points.** You build `OverlappedDDP`. It uses the buckets of lab 03, but launches a bucket while
# backward is still computing other gradients. You write four small pieces:
#
# - a queue that launches buckets in the same order on every rank (4.1),
# - the hook that tells the queue which gradients are ready, and lets autograd finish it when backward ends (4.2),
# - the wrapper that connects them to a module (4.3),
# - `no_sync()`, for accumulating micro-batches (4.4).
#
# The second code cell imports pieces of labs 02 and 03. To use your own, import them from `shared.mine`.
#
# Each exercise has a check. No check judges how long anything takes.

# %% tags=["nbval-ignore-output"]
from shared import measure, plots, ranks
from shared.checks import overlapped_ddp as check
from shared.predictions import predicted

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Data parallelism with overlap: each bucket's all-reduce starts while backward still computes."""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn

from shared import guards
from shared.guards import at_end_of_backward
from solutions.bucketed_ddp import Bucket, assign_buckets
from solutions.manual_ddp import broadcast_state

# %% [markdown]
# Your code needs only four members of a bucket. The next cell declares them as a **protocol**: every class that has
# these members satisfies it. Your `Bucket` from lab 03 has them.


# %% tags=["export"]
# %%ranks
class GradientBucket(Protocol):
    """Declares the members that a launch queue needs. Chapter 03's Bucket and chapter 08's ShardedBucket have them."""

    parameters: list[nn.Parameter]

    def pack(self, index: int) -> None:
        """Copy the gradient of parameters[index] into the flat tensor; None counts as zeros."""

    def launch(self) -> None:
        """Launch the collective that averages the flat tensor, and return at once."""

    def wait(self) -> None:
        """Wait until the collective is complete."""


# %% [markdown]
# ## Exercise 4.1 · Launch in one order (25 min, 3 points)
#
# All ranks must launch their collectives in the same order. But the order in which a rank's gradients become ready may
# depend on its samples. So the buckets wait in a queue: a bucket is launched when it is full *and all buckets before it
# have been launched*.
#
# `LaunchQueue(buckets)` has three attributes:
#
# - `buckets` is the argument. The given code of exercise 4.2 reads it.
# - `missing` is a list with one set per bucket. The set holds the indices of the gradients that are not packed yet.
# - `launched` is the number of buckets launched so far.
#
# It has two methods:
#
# - `add(bucket_index, index)` packs gradient `index` of bucket `bucket_index`. Then it launches every bucket that is
#   full and whose turn has come. It does not wait.
# - `finish()` is called when backward has ended. It packs the gradients that are still missing (`pack` puts zeros where
#   a gradient is None), launches the remaining buckets, and then waits for all buckets. After that, the queue is ready
#   for the next backward.
#
# Target: every bucket is packed completely, launched once, in order, and waited for once.
#
# Begin with `__init__` and `add`, and try them in the first cell below the exercise. Then write `finish`, and try it in
# the second one. Run the check only when you have written all three methods, because every test in it also calls
# `finish`.
#
# <details><summary>Hint 1: which buckets are launched in add?</summary>
#
# One `add` may complete a bucket that several full buckets have been waiting for. Which loop launches all of them, and
# when does it stop?
# </details>
# <details><summary>Hint 2: what does finish do about missing gradients?</summary>
#
# It packs them in the same way as gradients that are ready. Which of your methods does that already? And how are
# `missing` and `launched` reset to their initial values?
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


# %% [markdown]
# The next cell adds four gradients to three buckets that only print. The first two calls should launch nothing, the
# third should launch bucket 0, and the fourth buckets 1 and 2. So the last line of the output is `launch bucket 2`.


# %%
# %%ranks 0
class PrintingBucket:
    def __init__(self, name, count):
        self.name, self.parameters = name, [None] * count

    def pack(self, index):
        print(f"pack gradient {index} of {self.name}")

    def launch(self):
        print(f"    launch {self.name}")

    def wait(self):
        print(f"    wait for {self.name}")


def printing_queue():
    sizes = {"bucket 0": 1, "bucket 1": 2, "bucket 2": 1}
    return LaunchQueue([PrintingBucket(name, count) for name, count in sizes.items()])


queue = printing_queue()
for bucket_index, index in [(2, 0), (1, 1), (0, 0), (1, 0)]:
    queue.add(bucket_index, index)

# %% [markdown]
# Run the next cell once you have written `finish` and have run the cell of `LaunchQueue` again. It makes a new queue
# and adds one gradient. `finish` should pack the other three, launch the buckets in order, and only then wait for all
# of them. Packs and launches may alternate. The second `finish` stands for a step without a backward. It should do the
# same, but pack all four gradients.

# %%
# %%ranks 0
queue = printing_queue()
queue.add(2, 0)
for step in (1, 2):
    print(f"finish {step}:")
    queue.finish()

# %% tags=["check"] grade_id="check-launch-queue" points=3
check.LaunchQueue()

# %% [markdown]
# ## Exercise 4.2 · Launch during backward (20 min, 2 points)
#
# A hook has to call `add` while backward computes. A wrong hook may raise no error, so let's first try two hooks that
# look right but are wrong. You know `register_post_accumulate_grad_hook` from the lesson. If you register a hook with
# `register_hook` instead, autograd calls it with the gradient that the current backward has computed.


# %%
# %%ranks
def average(tensor):
    tensor /= world_size
    dist.all_reduce(tensor)


def hooked(register):
    """Accumulate two micro-batches, with the hook in the second. Returns the parameter and its gradient."""
    weight = nn.Parameter(torch.ones(1, device=device))
    (weight * (rank + 1)).sum().backward()  # no hook yet: only the sum needs an all-reduce
    getattr(weight, register)(average)
    (weight * 10 * (rank + 1)).sum().backward()
    return weight.item(), weight.grad.item()


# %% [markdown]
# On rank r, the gradients of the two micro-batches are r + 1 and 10 (r + 1), so their sum is 11 (r + 1). The parameter
# should stay 1, and every rank's gradient should be the mean of the four sums, 27.5.
#
# **Predict.** What is the gradient on rank 3 with each of the two hooks?

# %%
my_prediction = {"post-accumulate": None, "on the tensor": None}

# %%
# %%ranks
parameter, gradient = hooked("register_post_accumulate_grad_hook")
print(f"post-accumulate hook: parameter {parameter:.1f}, gradient {gradient:.1f}")

# %%
# %%ranks
parameter, gradient = hooked("register_hook")
print(f"hook on the tensor: parameter {parameter:.1f}, gradient {gradient:.1f}")

# %%
print(predicted(tuple(my_prediction.values()), "{} and {} for rank 3", "\n"), end="")

# %% [markdown]
# Neither hook raises an error, and both leave gradients that differ between ranks.
#
# - A post-accumulate hook receives the *parameter*, not its gradient. So `average` averaged the parameter, which is the
#   same on all ranks, and nothing seemed to happen.
# - A hook on the tensor receives the gradient of this backward *before* it is added to `.grad`. The gradient of the
#   first micro-batch was therefore never averaged.
#
# So we use post-accumulate hooks, but read `parameter.grad` ourselves. Autograd calls such a hook once per backward,
# when `.grad` is complete, even if the parameter is tied and gets two gradients.
#
# The next cell gives you `watch_gradients`, which registers a hook on each parameter of the buckets. The hook
# translates the parameter into the two indices that `add` takes. The weak reference and the clean-up at the end make
# sure that the hooks do not keep a deleted wrapper alive. You can go on without understanding them.


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
                lambda completed: guards.call_hook(method(), completed, *index_of[id(completed)])
            )
            hooks.callback(handle.remove)
    weakref.finalize(on_gradient.__self__, hooks.close)


# %% [markdown]
# `GradientSync(buckets)` connects the hooks with the queue. When backward ends, the queue has to be finished. In lab
# 03, the training loop took care of that. Here, autograd does. If you call `at_end_of_backward(method)`, autograd calls
# the method when the running backward ends, by means of the lesson's `queue_callback`. You may call it for every
# gradient, because it queues the method only once per backward.
#
# Most of the class is given. You need to know two of its methods:
#
# - `synchronize()` finishes the queue. This is what autograd has to call.
# - `finish()` is for a rank without a batch. None of that rank's hooks run, but the other ranks wait for its buckets.
#   If backward has averaged everything already, `finish()` does nothing.
#
# <details><summary>How the rest of the class works, if you want to know</summary>
#
# `pending` says whether this rank has gradients that are not averaged yet, and `done` whether a backward has averaged
# its gradients since the last `finish()`. `__setstate__` registers hooks for a copy made by `deepcopy`. The decorator
# checks gradients, and lets all ranks raise the same error.
# </details>
#
# The checks of 4.2 to 4.4 run on your `LaunchQueue`, so pass 4.1 first. Then complete `on_gradient(bucket_index,
# index)` with two or three lines. A hook calls `on_gradient` when a gradient is complete. Unless `self.enabled` is
# False, which 4.4 will use,
#
# - it adds the gradient to the queue,
# - and it asks autograd to call `self.synchronize` at the end of this backward.
#
# What if two backwards run in one step? The second one adds this rank's new gradient to the mean of the first, and
# averages the sums. A mean of equal means is the mean again, so the result is right.
#
# Target: each gradient is added once, in the backward that completes it, no hook waits, and the queue is finished once
# per backward. A `finish` after that does nothing.
#
# <details><summary>Hint 1: which class packs and launches?</summary>
#
# It is not `GradientSync`. Which method of the queue takes these two indices?
# </details>
# <details><summary>Hint 2: what do I ask autograd to call?</summary>
#
# A method, so pass it without parentheses. Why not `finish`? See what it does with `done`.
# </details>


# %% tags=["exercise", "export"] grade_id="gradient-sync"
# %%ranks
class GradientSync:
    """Launches the collectives of buckets while backward computes, and waits for them when it ends."""

    def __init__(self, buckets: Sequence[GradientBucket]):
        self.queue, self.enabled, self.pending, self.done = LaunchQueue(buckets), True, False, False
        watch_gradients(buckets, self.on_gradient)

    def on_gradient(self, bucket_index: int, index: int) -> None:
        """Note a gradient that backward() has just completed, and add it to the queue unless no_sync() is active."""
        self.pending = True
        ### BEGIN SOLUTION
        if self.enabled:
            at_end_of_backward(self.synchronize)
            self.queue.add(bucket_index, index)
        ### END SOLUTION

    @guards.synchronizes
    def synchronize(self) -> None:
        """Launch the remaining buckets, and wait until every gradient is averaged."""
        self.queue.finish()
        self.pending, self.done = False, True

    def finish(self) -> None:
        """Synchronize, unless a backward has done so since the last call; inside no_sync(), do nothing."""
        if self.enabled:
            if self.pending or not self.done:
                self.synchronize()
            self.done = False

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


# %% [markdown]
# Try it on a bucket that only prints. You should see `pack`, `launch` and `wait`, and nothing more: `finish` then has
# nothing left to do.

# %%
# %%ranks 0
bucket = PrintingBucket("bucket 0", 0)
bucket.parameters = [nn.Parameter(torch.ones(1))]
sync = GradientSync([bucket])
bucket.parameters[0].sum().backward()
sync.finish()

# %% tags=["check"] grade_id="check-gradient-sync" points=2
check.GradientSync()

# %% [markdown]
# ## Exercise 4.3 · The wrapper (10 min, 2 points)
#
# `OverlappedDDP(module, bucket_cap_mb=25.0, group=None)` is used like `BucketedDDP`. You have all of its pieces:
#
# - `__init__` broadcasts the state of `module` with `broadcast_state`, and splits its parameters with
#   `assign_buckets`. It makes a bucket from each list of parameters with `new_bucket(parameters, group)`, stores these
#   buckets in `self.buckets`, and stores one `GradientSync` for all of them in `self.sync`. Pass `group` to
#   `broadcast_state`, too. `new_bucket`, which is given, is `Bucket`.
# - `finish_gradient_sync()` calls the `finish` of that object.
#
# Target:
#
# - a full bucket whose turn has come is launched before backward continues,
# - no hook waits for a collective,
# - when `backward()` returns, every gradient is the mean over the ranks, even if nobody ever calls
#   `finish_gradient_sync()`, and also after a second `backward()`, which averages again,
# - if all ranks call `finish_gradient_sync()` once in every step, a rank that runs no `backward()` takes part with
#   zeros,
# - all ranks launch all buckets in the same order, even if a parameter is unused on one rank,
# - there is only one copy of the gradients, the one in the buckets.
#
# The check first compares the starting parameters of the ranks, and then trains a plain model on two ranks, with and
# without `finish_gradient_sync()`. After that, it tries tied, frozen and unused parameters, copies made by `deepcopy`,
# and deleted wrappers. The code for copies and deleted wrappers is given in 4.2.
#
# <details><summary>Hint</summary>
#
# `BucketedDDP.__init__` from lab 03 is almost right. What does this wrapper need in addition to buckets?
# </details>


# %% tags=["exercise", "export"] grade_id="overlapped-ddp"
# %%ranks
@guards.guarded(guards.Overlapped)
class OverlappedDDP(nn.Module):
    """Train a replica of module on each rank of the group, and average gradients while backward computes.

    When backward() returns, every gradient is the mean over the ranks. So all ranks must run equally many backward()
    outside no_sync(). Where one may run none, all ranks call finish_gradient_sync() in every step. If no rank has used
    a parameter, its gradient is zeros, or None if you send −0.0 for None (exercise 2.3). `.module` is the module.

    A compressor (chapter 19) makes buckets that send less. Without one, gradients are sent as they are. With one, the
    gradient of a parameter that no rank has used is zeros, so weight decay and momentum still change it.

    Communication: when built, one broadcast per parameter and buffer; per backward(), one all-reduce per bucket.
    """

    def __init__(
        self, module: nn.Module, bucket_cap_mb: float = 25.0, group=None, *, compressor=None
    ):
        super().__init__()
        self.module = module
        new_bucket = Bucket if compressor is None else compressor.new_bucket
        ### BEGIN SOLUTION
        broadcast_state(module, group)
        assigned = assign_buckets(module.parameters(), bucket_cap_mb)
        self.buckets = [new_bucket(parameters, group) for parameters in assigned]
        self.sync = GradientSync(self.buckets)
        ### END SOLUTION

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def finish_gradient_sync(self) -> None:
        """Average what is not averaged yet: gradients from no_sync(), or zeros on a rank that ran no backward().

        After a backward() outside no_sync(), nothing is left to do. If a rank may lack a batch, or may use no trained
        parameter, call this on all ranks after the last backward() of every step.
        """
        ### BEGIN SOLUTION
        self.sync.finish()
        ### END SOLUTION

    def no_sync(self):
        """Let gradients accumulate on this rank, without communication."""
        return self.sync.no_sync()


# %% tags=["check"] grade_id="check-overlapped-ddp" points=2
check.OverlappedDDP()

# %% [markdown]
# ## Exercise 4.4 · Communicate for the last micro-batch only (15 min, 2 points)
#
# When you accumulate gradients over micro-batches, only their sum has to be averaged:
#
# ```python
# with model.no_sync():
#     for micro_batch in micro_batches[:-1]:
#         loss_of(model, micro_batch).backward()      # accumulates, without communication
# loss_of(model, micro_batches[-1]).backward()        # averages the sum
# ```
#
# Write `GradientSync.no_sync` in the cell of exercise 4.2. Then run that cell and the cell of `OverlappedDDP` again.
#
# - Inside `no_sync()`, there is no communication, not even in `finish_gradient_sync()`. Afterwards, the next
#   `backward()` or `finish_gradient_sync()` averages all that has accumulated, including gradients of parameters that
#   only the earlier micro-batches have used.
# - Blocks can be nested: when the inner one ends, communication stays disabled for the rest of the outer block.
# - After an exception in the block, even a `KeyboardInterrupt`, communication is enabled or disabled as it was before
#   the block.
#
# <details><summary>Hint 1: what must be true after the block?</summary>
#
# Which attribute changes during the block, and which value did it have before? In a nested block, that value is False.
# </details>
# <details><summary>Hint 2: what happens to an exception?</summary>
#
# `contextlib.contextmanager` raises the block's exception at your `yield`. Which of your lines does Python run after
# that?
# </details>

# %% tags=["check"] grade_id="check-no-sync" points=2
check.no_sync()

# %% [markdown]
# ## Your figure (10 min)
#
# How much communication does your wrapper hide? Measure it with the lesson's GPT, whose blocks sleep as a stand-in for
# a GPU, behind a link of 1 Gbit/s. A real link would need new ranks, which would not know your class, so the link is
# *emulated*. With NCCL, the ranks use their own links, which are much faster.


# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

from shared import measure
from shared.data import CharTokens
from shared.models import GPTConfig, TinyGPT, stand_in_for_gpu
from solutions.bucketed_ddp import BucketedDDP

link = measure.behind_link("1gbit", latency_ms=0.5)
text = CharTokens()
text.tokens = text.tokens.to(device)
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
sample = text.windows([1000 * rank], length=16)


# %%
# %%ranks --timeout 120
def recorded_step(wrapper):
    """Record seven steps of a new model. Returns the one with the median exposed time, as rank 0 recorded it."""
    model = TinyGPT(config).to(device)
    stand_in_for_gpu(model.blocks, forward_ms=8, backward_ms=16)
    return measure.recorded_step(wrapper(model, bucket_cap_mb=2.0), *sample)[0]


wrappers = (BucketedDDP, OverlappedDDP, DistributedDataParallel)
lines = {wrapper.__name__: recorded_step(wrapper) for wrapper in wrappers}

# %% [markdown]
# The figure shows a step of `BucketedDDP`, and below it a step of your wrapper, with the same buckets and the same
# bytes. `BucketedDDP` launches all of its all-reduces after backward. In the empty gap before its waits, it copies the
# gradients into buckets. Compare the exposed times on the right. If another rank launched a bucket later, the bucket's
# bar is long, and the next bars may end in quick succession, because the emulated link counts from its own rank's
# launches.

# %% tags=["nbval-ignore-output"]
lines = ranks.pull("lines")[0]
before, yours = lines["BucketedDDP"], lines["OverlappedDDP"]
measure.expect(before.overlap < 0.1, "nothing overlaps")
sent_bytes = [sum(span.payload_bytes for span in line.spans) for line in (before, yours)]
assert sent_bytes[0] == sent_bytes[1]
measure.expect(yours.exposed_ms < before.exposed_ms, "your wrapper exposes less")
plots.timeline([before, yours], ["BucketedDDP", "yours"])

# %% [markdown]
# The next figure compares the exposed communication of these two wrappers and of torch's DDP with the same cap. DDP's
# first bucket is larger than yours, because DDP applies a cap that you set to the first bucket, too, and closes a
# bucket only when it has reached the cap (chapter 03). Either of them can expose less.

# %% tags=["nbval-ignore-output"]
exposed_ms = {name: line.exposed_ms for name, line in lines.items()}
torchs_ms = exposed_ms["DistributedDataParallel"]
measure.expect(torchs_ms < exposed_ms["BucketedDDP"], "torch's DDP exposes less")
plots.bars(exposed_ms, "ms exposed")

# %% [markdown]
# In lab 05, you will measure how much longer a whole step takes because of communication.

# %%
ranks.stop()
