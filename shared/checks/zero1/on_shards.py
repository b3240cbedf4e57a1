"""Train with a ShardedOptimizer, which expects that the gradients are already averaged."""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist

from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.flat_layout import defined_beside
from shared.checks.engine.sharded.plan import Plan
from shared.checks.engine.sharded.training import HINT_ON_SHARDS, probe_sharded


def with_mean_gradients(sharded_optimizer: type) -> type:
    """Return a class with the arguments of ZeRO1, whose step() sets the mean gradients and then runs the student's."""

    class Averaging(sharded_optimizer):
        def __init__(self, params, optimizer_cls: type, group: dist.ProcessGroup | None = None, **defaults):
            flatten = functools.partial(defined_beside(sharded_optimizer, "flatten_and_broadcast"), group=group)
            super().__init__(params, optimizer_cls, flatten, group, **defaults)

        def step(self) -> None:
            for flat_parameter in self.flat_parameters:
                layout = flat_parameter.layout
                mean = layout.new_flat()
                for view, parameter in zip(layout.views(mean), layout.parameters, strict=True):
                    if parameter.grad is not None:
                        view.copy_(parameter.grad)
                dist.all_reduce(mean, group=layout.group)
                flat_parameter.shard.grad = layout.shard_of(mean).div(dist.get_world_size(layout.group))
            super().step()
            if hasattr(self, "inner"):  # there may be other ways to update the shards
                reject_replaced_shards(self)

    return Averaging


def reject_replaced_shards(optimizer) -> None:
    """Reject an inner optimizer that no longer updates this rank's shards.

    Raises:
        AssertionError: If its param groups hold other tensors.
    """
    shards = {id(flat_parameter.shard) for flat_parameter in optimizer.flat_parameters}
    updated = {id(parameter) for group in optimizer.inner.param_groups for parameter in group["params"]}
    if updated != shards:
        raise AssertionError(
            "after step(), the param groups of `inner` do not hold this rank's shards. "
            "Hint: which entries of a param group do you copy?"
        )


def probe_on_shards(sharded_optimizer: type, plan: Plan, seed: int, x: torch.Tensor, y: torch.Tensor) -> dict:
    """Train as probe_sharded() does. Returns what it returns."""
    return probe_sharded(with_mean_gradients(sharded_optimizer), plan, seed, x, y)


def on_shards(judge: Callable) -> Callable[[Attempt], None]:
    """Let a judge of trainings try a ShardedOptimizer instead of a ZeRO1."""

    def judged(attempt: Attempt) -> None:
        try:
            judge(attempt, probe=probe_on_shards)
        except Wrong as wrong:
            if wrong.hint == HINT_ON_SHARDS:  # here, the mean gradients are right
                wrong.hint = "Hint: is this element in the rank's own shard, or does the rank get it from another one?"
            raise

    return judged
