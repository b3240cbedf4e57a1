"""Train with a ShardedOptimizer, which expects that the gradients are already averaged."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.hints import replacing_hints
from shared.checks.engine.sharded.flat_layout import defined_beside
from shared.checks.engine.sharded.plan import Plan, RunReport
from shared.checks.engine.sharded.training import HINT_ON_OWNERS, HINT_ON_SHARDS, probe_sharded, trains


def with_mean_gradients(sharded_optimizer: type) -> type:
    """Return a class with the arguments of ZeRO1, whose step() sets the mean gradients and then runs the student's."""

    class Averaging(sharded_optimizer):
        def __init__(self, params, optimizer_cls: type, group: dist.ProcessGroup | None = None, **defaults):
            flatten = functools.partial(defined_beside(sharded_optimizer, "flatten_and_broadcast"), group=group)
            super().__init__(params, optimizer_cls, flatten, group, **defaults)

        def add_param_group(self, param_group: dict) -> None:
            super().add_param_group(param_group)
            if hasattr(self, "inner"):
                _judge_settings(self)

        def step(self) -> None:
            for flat_parameter in self.flat_parameters:
                layout = flat_parameter.layout
                mean = layout.new_flat()
                for view, parameter in zip(layout.views(mean), layout.parameters, strict=True):
                    if parameter.grad is not None:
                        view.copy_(parameter.grad)
                dist.all_reduce(mean, group=layout.group)
                flat_parameter.shard.grad = layout.shard_of(mean).div(dist.get_world_size(layout.group))
            with recorded_gathers(self.flat_parameters) as (events, in_flight):
                super().step()
            _judge_gathers(events, in_flight)
            _expect(
                all(flat_parameter.shard.grad is None for flat_parameter in self.flat_parameters),
                "after step(), shard.grad still holds the mean gradient. "
                "Hint: what would the next step() do with it if there were no new gradients?",
            )
            if hasattr(self, "inner"):  # there may be other ways to update the shards
                _judge_shards(self)

    return Averaging


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AssertionError(otherwise)


@contextlib.contextmanager
def recorded_gathers(flat_parameters: list) -> Iterator[tuple[list[str], dict]]:
    """Record, in order, each launch_all_gather() of these flat parameters and each wait() for one.

    Yields:
        The events, and the handles that nothing has waited for yet.
    """
    events: list[str] = []
    in_flight: dict[int, object] = {}

    def launching(launch: Callable):
        handle, number = launch(), len(events)
        events.append("launch")
        in_flight[number] = handle

        def wait(*_):
            events.append("wait")
            in_flight.pop(number, None)
            return handle.wait()

        return SimpleNamespace(wait=wait)

    with contextlib.ExitStack() as stack:
        for each in flat_parameters:
            recorded = functools.partial(launching, each.launch_all_gather)
            stack.enter_context(mock.patch.object(each, "launch_all_gather", recorded))
        yield events, in_flight


def _judge_gathers(events: list[str], in_flight: dict) -> None:
    """Reject a wait() before the last launch, and all-gathers that are still in flight, after waiting for them."""
    number, total = events.index("wait") if "wait" in events else len(events), events.count("launch")
    _expect(
        "launch" not in events[number:],
        f"step() waits when {number} of {total} all-gathers {'has' if number == 1 else 'have'} been launched. "
        "Hint: which all-gathers could already be in flight?",
    )
    for handle in in_flight.values():
        handle.wait()
    _expect(
        not in_flight,
        f"step() returns while {len(in_flight)} of {total} all-gathers {'is' if len(in_flight) == 1 else 'are'} "
        "still in flight. Hint: what do you do with the handle that launch_all_gather() returns?",
    )


def _judge_settings(optimizer) -> None:
    """Reject a new inner param group whose settings are not those of the optimizer's param group."""
    groups, inner_groups = optimizer.param_groups, optimizer.inner.param_groups
    _expect(
        len(inner_groups) == len(groups),
        f"after add_param_group(), `inner` has {len(inner_groups)} param groups; expected {len(groups)}. "
        "Hint: which method adds one to `inner`?",
    )
    inner = inner_groups[-1]
    for name, value in groups[-1].items():
        found = f"{name} = {inner[name]}" if name in inner else f"no {name}"
        _expect(
            name == "params" or (name in inner and inner[name] == value),
            f"after add_param_group(), the new param group of `inner` has {found}; expected {value}. "
            "Hint: what does a param group hold besides its parameters?",
        )


def _judge_shards(optimizer) -> None:
    """Reject an inner optimizer that no longer updates this rank's shards."""
    shards = {id(flat_parameter.shard) for flat_parameter in optimizer.flat_parameters}
    updated = {id(parameter) for group in optimizer.inner.param_groups for parameter in group["params"]}
    _expect(
        not shards < updated,
        "after step(), flat_parameters lacks some of the shards that `inner` updates. "
        "Hint: what does add_param_group() do with the flat parameters of earlier param groups?",
    )
    _expect(
        updated == shards,
        "after step(), the param groups of `inner` do not hold this rank's shards. "
        "Hint: which entries of a param group do you copy?",
    )


def probe_on_shards(
    sharded_optimizer: type, plan: Plan, seed: int, x: torch.Tensor, y: torch.Tensor
) -> RunReport | None:
    """Train as probe_sharded() does. Returns what it returns."""
    return probe_sharded(with_mean_gradients(sharded_optimizer), plan, seed, x, y)


def trains_on_shards(plans: list[Plan], *claims: Callable) -> Callable[[Attempt], None]:
    """Return the judge that trains() returns, for a ShardedOptimizer. Here, the mean gradients are right."""
    return replacing_hints({HINT_ON_SHARDS: HINT_ON_OWNERS})(trains(plans, *claims, probe=probe_on_shards))
