# ---
# jupyter:
#   course:
#     module: overlapped_ddp
#     minutes: 70
# ---

# %% [markdown]
# # Lab 04 · Overlap
#
# **70 minutes, 13 points.** You build `OverlappedDDP`: the buckets of lab 03, each sent while backward still works on
# the rest. Done by hooks, which is where the mistakes are that raise no error; you will meet two of them.
#
# Each exercise has a check. Times are never judged, but the order of what happened is.

# %% tags=["nbval-ignore-output"]
from shared import plots, ranks, tables
from shared.checks import overlapped_ddp as check

ranks.start(world_size=4)

# %% tags=["export"]
# %%ranks
"""Data parallelism with overlap: gradient buckets travel while backward still computes."""

import contextlib
import statistics
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from solutions.bucketed_ddp import Bucket, BucketedDDP

# %% [markdown]
# ## Exercise 4.1 · Break it, twice (10 min, 2 points)
#
# A hook is a function that autograd calls. Two kinds look right here, and both have been published in code that
# trains:


# %%
# %%ranks
def average(tensor):
    tensor /= world_size
    dist.all_reduce(tensor)


def hooked(register):
    """Two micro-batches; gradients are to be averaged in the second. → (parameter, gradient) at the end"""
    weight = nn.Parameter(torch.ones(1, device=device))
    (weight * (rank + 1)).sum().backward()  # no message yet, to save one
    getattr(weight, register)(average)
    (weight * 10 * (rank + 1)).sum().backward()
    return weight.item(), weight.grad.item()


# %% [markdown]
# Rank r's gradients are r + 1 and 10 (r + 1). The mean of their sum is 27.5 on every rank, and the parameter should
# stay 1. **Predict**, for each of the two: parameter and gradient, on ranks 0 and 3.

# %%
# %%ranks
parameter, gradient = hooked("register_post_accumulate_grad_hook")
print(f"post-accumulate hook: parameter {parameter:.1f}, gradient {gradient:.1f}")

# %%
# %%ranks
parameter, gradient = hooked("register_hook")
print(f"hook on the tensor: parameter {parameter:.1f}, gradient {gradient:.1f}")

# %% [markdown]
# No error, and gradients that differ from rank to rank. The first averaged what it was handed: the *parameter*, equal
# on all ranks, so that nobody noticed. Look up what a post-accumulate hook receives. The second averaged a
# gradient, but which part of it?
#
# Write what both should have been. `tell(parameter)` is to be called once per backward and trainable parameter, when
# `parameter.grad` holds all that this and earlier backwards have added to it; a tied parameter is one parameter. Give
# back a function that takes all hooks away again.
#
# Target: no message, and nothing but `tell` sees or changes a gradient.


# %% tags=["exercise", "export"] grade_id="on-gradients"
# %%ranks
def on_gradients(
    parameters: list[nn.Parameter], tell: Callable[[nn.Parameter], None]
) -> Callable[[], None]:
    """Have tell(parameter) called whenever backward() has completed parameter.grad. → a function that ends this"""
    ### BEGIN SOLUTION
    hooks = contextlib.ExitStack()
    for parameter in parameters:
        if parameter.requires_grad:
            hooks.callback(parameter.register_post_accumulate_grad_hook(tell).remove)
    return hooks.close
    ### END SOLUTION


# %% tags=["check"] grade_id="check-on-gradients" points=2
check.on_gradients()

# %% [markdown]
# ## Exercise 4.2 · In one order (15 min, 2 points)
#
# Collectives must be launched in the same order on every rank, and gradients become ready in whatever order this
# rank's samples make of the model. So buckets stand in a queue: a bucket is launched when it is full *and all before it
# have been launched*.
#
# A queue knows of its buckets `parameters`, `pack`, `launch` and `wait`, as in lab 03. `add(number, place)` packs
# gradient `place` of bucket `number`, and launches every bucket that may go now. `finish()`
# packs what has not come (no gradient this time: zeros, as `Bucket.pack` knows), launches the rest, waits for all, and
# is ready for the next backward.
# ```python
# # buckets of 1, 2 and 1 gradients      launched so far
# queue.add(2, 0)                        # none: bucket 0 is not full
# queue.add(1, 1)                        # none
# queue.add(0, 0)                        # 0
# queue.add(1, 0)                        # 0, 1, 2
# ```


# %% tags=["exercise", "export"] grade_id="launch-queue"
# %%ranks
class LaunchQueue:
    """Launches buckets in their fixed order, the same on every rank, each as soon as it is its turn and it is full.

    `missing[number]` is the set of places whose gradients have not come yet; `launched` counts buckets under way.
    """

    def __init__(self, buckets: list[Bucket]):
        ### BEGIN SOLUTION
        self.buckets = buckets
        self._begin()
        ### END SOLUTION

    def add(self, number: int, place: int) -> None:
        """Pack a gradient that is ready, and launch what may go now. Comm: one all_reduce per bucket launched."""
        ### BEGIN SOLUTION
        self.buckets[number].pack(place)
        self.missing[number].remove(place)
        while self.launched < len(self.buckets) and not self.missing[self.launched]:
            self.buckets[self.launched].launch()
            self.launched += 1
        ### END SOLUTION

    def finish(self) -> None:
        """Launch the rest, wait for everything, and begin anew."""
        ### BEGIN SOLUTION
        for number, places in enumerate(self.missing):
            for place in sorted(places):
                self.add(number, place)
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
# ## Exercise 4.3 · The wrapper (25 min, 5 points)
#
# `OverlappedDDP(module, bucket_cap_mb=25.0, group=None)`: hooks feed the queue during `backward()`, and
# `finish_gradient_sync()` does what is left. It comes in two classes: `EagerDDP`, on top of lab 03's `BucketedDDP`
# (which brings the module, its buckets and `forward`), and in exercise 4.4 `OverlappedDDP` on top of that. The check
# comes below both, and needs no `no_sync`. Your own names inside are yours to choose.
#
# - A parameter may go unused on one rank only. All ranks launch all buckets all the same, in the same order.
# - A copy made by `deepcopy` synchronises its own parameters. Do hooks come along? (A copy is a new object that is
#   handed the old one's state: look up `__setstate__`.)
# - A wrapper that is thrown away (`del model`) sends nothing more, whatever is done with its module. A hook that holds
#   `self` would keep it alive; a `weakref.ref(self)` does not.
# - Another gradient for a parameter whose last one is packed or under way (a second `backward()` before
#   `finish_gradient_sync()`, inside `no_sync()` too) is refused with a `RuntimeError` that says what to do instead.
#   `Bucket.pack` refuses `backward(create_graph=True)` already.
#
# Target: every bucket that is full is launched before backward goes on, and nothing waits inside backward. One copy of
# the gradients, that of the buckets.


# %% tags=["exercise", "export"] grade_id="eager-ddp"
# %%ranks
class EagerDDP(BucketedDDP):
    """Sends each bucket while backward() computes: when it is full and its turn has come.

    Raises: RuntimeError, in backward(), for a second gradient before finish_gradient_sync().
    """

    def __init__(
        self, module: nn.Module, bucket_cap_mb: float = 25.0, group: dist.ProcessGroup | None = None
    ):
        ### BEGIN SOLUTION
        super().__init__(module, bucket_cap_mb, group)
        self.queue, self.syncs = LaunchQueue(self.buckets), True
        self._watch_gradients()
        ### END SOLUTION

    def finish_gradient_sync(self) -> None:
        """Wait until every gradient is the mean over the ranks."""
        ### BEGIN SOLUTION
        if self.syncs:
            self.queue.finish()

    def _watch_gradients(self) -> None:
        self._place_of = {
            parameter: (number, place)
            for number, bucket in enumerate(self.buckets)
            for place, parameter in enumerate(bucket.parameters)
        }
        wrapper = weakref.ref(self)  # held by hooks, a wrapper could not be thrown away
        forget = on_gradients(list(self._place_of), lambda each: wrapper()._on_gradient(each))
        weakref.finalize(self, forget)

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        number, place = self._place_of[parameter]
        if place not in self.queue.missing[number]:
            raise RuntimeError(
                "a gradient came while the one before is under way: call finish_gradient_sync() "
                "after each backward(), and let gradients accumulate inside no_sync()"
            )
        if self.syncs:
            self.queue.add(number, place)
        ### END SOLUTION


# %% [markdown]
# ## Exercise 4.4 · Messages for the last micro-batch only (10 min, 2 points)
#
# ```python
# with model.no_sync():
#     for micro_batch in micro_batches[:-1]:
#         loss_of(model, micro_batch).backward()      # adds up, sends nothing
# loss_of(model, micro_batches[-1]).backward()        # sends the sum
# model.finish_gradient_sync()
# ```
# Inside `no_sync()`, `finish_gradient_sync()` does nothing. It may be nested, and an exception that leaves it must
# leave the wrapper as it was before.


# %% tags=["exercise", "export"] grade_id="overlapped-ddp"
# %%ranks
class OverlappedDDP(EagerDDP):
    """Train a replica of module on each rank of the group, with gradients averaged while backward computes.

    Call finish_gradient_sync() after backward() and before the optimizer's step. `.module` is the module itself.

    Comm: when built, one broadcast per parameter and buffer; per step, one all_reduce per bucket.
    """

    @contextlib.contextmanager
    def no_sync(self):
        """Let gradients add up on this rank, without a message."""
        ### BEGIN SOLUTION
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def __setstate__(self, state) -> None:
        # deepcopy and pickle come here: hooks stay behind, with the original's parameters
        super().__setstate__(state)
        self._watch_gradients()
        ### END SOLUTION


# %% tags=["check"] grade_id="check-overlapped-ddp" points=5
check.OverlappedDDP()

# %% tags=["check"] grade_id="check-no-sync" points=2
check.no_sync()

# %% [markdown]
# ## Exercise 4.5 · What communication really costs (10 min, 2 points)
#
# The time of a message says little: it may be hidden. What counts is what a step takes *longer* because of it. Measure
# the step with and without messages, in turn, and give back the medians:
# ```python
# compute_ms = median(forward, backward, finish, inside no_sync)
# exposed_ms = median(the same outside) - compute_ms
# ```
# (The lesson took the fastest rounds: what the machine can do. Medians are what it does.)
#
# `now_ms()` reads the clock (and lets a GPU finish first). Each measurement starts on all ranks at once
# (`dist.barrier()`, before the clock is read) and from gradients that are None. `rounds` rounds count, after one more
# that warms up and does not. In each round, the one without messages comes first.


# %% tags=["exercise", "export"] grade_id="communication-cost"
# %%ranks
def communication_cost(
    model: nn.Module, loss_of: Callable, now_ms: Callable[[], float], rounds: int = 10
) -> tuple[float, float]:
    """Measure what a step spends on computing, and what messages add to it. → compute_ms, exposed_ms

    loss_of(model) runs forward. Not counted: the first round.
    """

    ### BEGIN SOLUTION
    def step_ms() -> float:
        model.zero_grad(set_to_none=True)
        dist.barrier()
        began_ms = now_ms()
        loss_of(model).backward()
        model.finish_gradient_sync()
        return now_ms() - began_ms

    alone_ms, together_ms = [], []
    for _ in range(rounds + 1):
        with model.no_sync():
            alone_ms.append(step_ms())
        together_ms.append(step_ms())
    compute_ms = statistics.median(alone_ms[1:])
    return compute_ms, statistics.median(together_ms[1:]) - compute_ms
    ### END SOLUTION


# %% tags=["check"] grade_id="check-communication-cost" points=2
check.communication_cost()

# %% [markdown]
# ## Your figure, and torch's answer
#
# Your wrapper, between the one of lab 03 and torch's DDP, on a GPT of 2.7 million parameters. The ranks know your
# class, and new ones would not; so these stay, behind an *emulated* link of 1 Gbit/s (with NCCL, behind their own).
# Ranks compare notes no more: that costs messages.


# %%
# %%ranks
from shared import memory, timeline, wire
from shared.data import CharTokens
from shared.hosts import emulated
from shared.models import GPTConfig, TinyGPT
from shared.wire import mismatch

mismatch.ignore()
link = contextlib.ExitStack()
if dist.get_backend() == "gloo":
    link.enter_context(emulated.link("1gbit", latency_ms=0.1))

text = CharTokens()
config = GPTConfig(vocab_size=text.vocab_size, layers=6, width=192)
samples = text.windows(range(1000 * rank, 1000 * rank + 600, 100), length=64)
inputs, targets = (tensor.to(device) for tensor in samples)


# %% [markdown]
# All three with the same two methods, so that one function measures them:


# %%
# %%ranks
from torch.nn.parallel import DistributedDataParallel

from solutions.bucketed_ddp import BucketedDDP


class AfterBackward(BucketedDDP):
    @contextlib.contextmanager
    def no_sync(self):
        self.finish_gradient_sync = lambda: None
        yield
        del self.finish_gradient_sync


class Torchs(DistributedDataParallel):
    def finish_gradient_sync(self):  # its backward() ends when everything has arrived
        pass


models = {
    "BucketedDDP": AfterBackward(TinyGPT(config).to(device), bucket_cap_mb=2.0),
    "OverlappedDDP": OverlappedDDP(TinyGPT(config).to(device), bucket_cap_mb=2.0),
    "torch's DDP": Torchs(
        TinyGPT(config).to(device), bucket_cap_mb=2.0, gradient_as_bucket_view=True
    ),
}


# %%
# %%ranks
def step(model, optimizer):
    """→ loss, timeline, ledger"""
    optimizer.zero_grad()
    dist.barrier()
    with wire.ledger() as log, timeline.record(model, optimizer) as line:
        loss = model(inputs, targets)
        loss.backward()
        model.finish_gradient_sync()
        optimizer.step()
    return loss.item(), line, log


def trained(model, steps=4):
    """→ [steps] of what step() gives, bytes at the peak of one more"""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    taken = [step(model, optimizer) for _ in range(steps)]
    with memory.peak(model, optimizer) as peak:
        step(model, optimizer)
    return taken, peak.peak_bytes


results = {name: trained(model) for name, model in models.items()}

# %% [markdown]
# Rank 0's last step, all messages after backward:


# %% tags=["nbval-ignore-output"]
def last_timeline(name):
    taken, _ = ranks.pull("results")[0][name]
    return taken[-1][1]


assert last_timeline("BucketedDDP").overlap < 0.1
plots.timeline([last_timeline("BucketedDDP")])

# %% [markdown]
# And yours:

# %% tags=["nbval-ignore-output"]
plots.timeline([last_timeline("OverlappedDDP")])

# %% [markdown]
# Exercise 4.5 says what is left of the communication, and the ledger what was sent:


# %%
# %%ranks
import time


def now_ms():
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * time.perf_counter()


def loss_of(model):
    return model(inputs, targets)


costs = {
    name: communication_cost(model, loss_of, now_ms, rounds=5) for name, model in models.items()
}

# %% tags=["nbval-ignore-output"]
rows, costs, endings, payloads_bytes = [], ranks.pull("costs"), {}, set()
for name, (taken, peak_bytes) in ranks.pull("results")[0].items():
    endings[name], _, log = taken[-1]
    payloads_bytes.add(log.payload_bytes)
    exposed_ms = max(0.0, *(of_rank[name][1] for of_rank in costs))
    sent = f"{log.sent_bytes / 1e6:.1f}"
    early = sum(entry.in_backward for entry in log.entries)
    assert early == (0 if name == "BucketedDDP" else log.messages)
    row = [name, f"{endings[name]:.4f}", f"{log.messages}", f"{early}", sent]
    rows.append([*row, f"{exposed_ms:.0f}", f"{peak_bytes / 1e6:.1f}"])
assert max(endings.values()) - min(endings.values()) < 1e-3 and len(payloads_bytes) == 1
header = ["", "loss", "messages", "in backward", "sent, MB", "exposed, ms", "peak, MB"]
tables.Table(header, rows, "rank 0; exposed on the rank where it is most")

# %% [markdown]
# The same losses, the same bytes; yours leaves exposed what torch's does, give or take this machine's noise. What
# neither of you saves stands in the last column: four ranks, and each holds the parameters, the gradients and the
# optimizer's state of all. Chapter 06 weighs them.

# %%
ranks.stop()
