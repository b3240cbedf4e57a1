# Built by `make notebooks` from source/04_overlap/lab.py: edit that, not this.
"""Data parallelism with overlap: gradient buckets travel while backward still computes."""

import contextlib
import statistics
import weakref
from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from solutions.bucketed_ddp import Bucket, BucketedDDP


def on_gradients(parameters: list[nn.Parameter], tell: Callable[[nn.Parameter], None]) -> Callable[[], None]:
    """Have tell(parameter) called whenever backward() has completed parameter.grad. → a function that ends this"""
    hooks = contextlib.ExitStack()
    for parameter in parameters:
        if parameter.requires_grad:
            hooks.callback(parameter.register_post_accumulate_grad_hook(tell).remove)
    return hooks.close


class LaunchQueue:
    """Launches buckets in their fixed order, the same on every rank, each as soon as it is its turn and it is full.

    `missing[number]` is the set of places whose gradients have not come yet; `launched` counts buckets under way.
    """

    def __init__(self, buckets: list[Bucket]):
        self.buckets = buckets
        self._begin()

    def add(self, number: int, place: int) -> None:
        """Pack a gradient that is ready, and launch what may go now. Comm: one all_reduce per bucket launched."""
        self.buckets[number].pack(place)
        self.missing[number].remove(place)
        while self.launched < len(self.buckets) and not self.missing[self.launched]:
            self.buckets[self.launched].launch()
            self.launched += 1

    def finish(self) -> None:
        """Launch the rest, wait for everything, and begin anew."""
        for number, places in enumerate(self.missing):
            for place in sorted(places):
                self.add(number, place)
        for bucket in self.buckets:
            bucket.wait()
        self._begin()

    def _begin(self) -> None:
        self.missing = [set(range(len(bucket.parameters))) for bucket in self.buckets]
        self.launched = 0


class EagerDDP(BucketedDDP):
    """Sends each bucket while backward() computes: when it is full and its turn has come.

    Raises: RuntimeError, in backward(), for a second gradient before finish_gradient_sync().
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0, group: dist.ProcessGroup | None = None):
        super().__init__(module, bucket_cap_mb, group)
        self.queue, self.syncs = LaunchQueue(self.buckets), True
        self._watch_gradients()

    def finish_gradient_sync(self) -> None:
        """Wait until every gradient is the mean over the ranks."""
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


class OverlappedDDP(EagerDDP):
    """Train a replica of module on each rank of the group, with gradients averaged while backward computes.

    Call finish_gradient_sync() after backward() and before the optimizer's step. `.module` is the module itself.

    Comm: when built, one broadcast per parameter and buffer; per step, one all_reduce per bucket.
    """

    @contextlib.contextmanager
    def no_sync(self):
        """Let gradients add up on this rank, without a message."""
        before, self.syncs = self.syncs, False
        try:
            yield
        finally:
            self.syncs = before

    def __setstate__(self, state) -> None:
        # deepcopy and pickle come here: hooks stay behind, with the original's parameters
        super().__setstate__(state)
        self._watch_gradients()


def communication_cost(
    model: nn.Module, loss_of: Callable, now_ms: Callable[[], float], rounds: int = 10
) -> tuple[float, float]:
    """Measure what a step spends on computing, and what messages add to it. → compute_ms, exposed_ms

    loss_of(model) runs forward. Not counted: the first round.
    """

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
