"""The decorator that guards a wrapper, and the call of its hooks."""

import copy
import functools
import inspect
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn

from shared.guards.alarms import as_a_wait
from shared.guards.backwards import complete_interrupted, forget_backward, is_interrupted
from shared.guards.calls import second_gradient
from shared.guards.exchanges import Exchange, abandon
from shared.guards.guard import EQUALLY_OFTEN, OF_OTHERS, Guard
from shared.guards.tensors import reject_gradient, reject_shared_memory


def guarded(exchange_of: type[Exchange]) -> Callable[[type], type]:
    """Guard a class of wrappers: check the module when it is wrapped, and its parameters when gradients are averaged.

    That is in finish_gradient_sync(), or in the method of the wrapper's `sync` that @synchronizes guards. A parameter
    that no rank has used keeps a gradient of None, if the wrapper sends UNUSED for None, and does not shard its
    gradients. A wrapper that lacks what `exchange_of` reads is checked only when it is built.

    Args:
        exchange_of: how the class exchanges gradients, one of shared.guards.exchanges.
    """

    def decorate(wrapper_class):
        build, finish = wrapper_class.__init__, vars(wrapper_class).get("finish_gradient_sync")

        @functools.wraps(build)
        def build_guarded(self, module: nn.Module, *args, **kwargs) -> None:
            given = inspect.signature(build).bind(self, module, *args, **kwargs).arguments
            guard = Guard(given.get("group"), clip_with=exchange_of.clip_with, has_hooks=exchange_of.has_hooks)
            reject_joint(module, guard.alarm.group)
            guard.watch(module)
            if exchange_of.is_sharded:
                reject_shared_memory(dict(chain(module.named_parameters(), module.named_buffers())))
            build(self, module, *args, **kwargs)
            self.guard = guard
            try:
                exchange_of(self).attach(guard)
            except AttributeError:  # It is built in another style.
                self.guard = None
            else:
                if not exchange_of.has_hooks:
                    guard.await_finish(finish is not None and type(self).finish_gradient_sync is finish_guarded)

        @functools.wraps(finish or build)
        def finish_guarded(self) -> None:
            if (guard := self.guard) is None:
                return finish(self)
            exchange = exchange_of(self)
            with guard.synchronizing(exchange):
                if guard.pending or not (exchange.adds_up and guard.awaits_finish):
                    finish(self)

        wrapper_class.__init__, wrapper_class.guard = build_guarded, None
        if finish is not None and not exchange_of.has_hooks:
            wrapper_class.finish_gradient_sync = finish_guarded
        if exchange_of.is_sharded and {"step", "zero_grad"} <= vars(wrapper_class).keys():
            _guard_zero_grad(wrapper_class, exchange_of)
        if "__deepcopy__" not in vars(wrapper_class):
            wrapper_class.__deepcopy__ = _copy
        return wrapper_class

    return decorate


def reject_joint(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError if a model's gradients would be averaged twice, or are added up over the same ranks."""
    ranks = {*dist.get_process_group_ranks(group or dist.group.WORLD)}
    for name, layer in module.named_modules():
        if isinstance(layer, nn.parallel.DistributedDataParallel):
            raise ValueError(
                f"{name or 'the module'} is a DistributedDataParallel, which averages gradients, too: wrap its .module"
            )
        guard = getattr(layer, "guard", None)
        if isinstance(guard, Guard) and guard.is_joint:
            shared = ranks & {*dist.get_process_group_ranks(guard.alarm.group or dist.group.WORLD)}
            if len(shared) > 1:
                raise ValueError(
                    f"{type(layer).__name__} already adds up the gradients of ranks {sorted(shared)}, so their mean "
                    "would be too small: pass group=, with ranks that have different batches, or do not wrap it"
                )


def synchronizes(average: Callable[[Any], None]) -> Callable[[Any], None]:
    """Guard the method of a GradientSync that averages gradients: check them before, and listen to other ranks after.

    Autograd calls the method at the end of backward(), and finish() may call it.
    """

    @functools.wraps(average)
    def average_guarded(sync) -> None:
        forget_backward(sync)
        if (guard := getattr(sync, "guard", None)) is None:  # Overlapped.attach() sets it.
            return average(sync)
        with guard.synchronizing(guard.exchange_of(sync)):
            average(sync)

    return average_guarded


def _guard_zero_grad(wrapper_class: type, exchange_of: type[Exchange]) -> None:
    """Guard the time at which zero_grad() is called: after each step()."""
    step, zero_grad = wrapper_class.step, wrapper_class.zero_grad

    @functools.wraps(step)
    def step_guarded(self, *args, **kwargs):
        if self.guard is not None:
            self.guard.reject_used_gradients()
        result = step(self, *args, **kwargs)
        if self.guard is not None:
            self.guard.awaits_zero_grad = type(self).zero_grad is zero_grad_guarded
        return result

    @functools.wraps(zero_grad)
    def zero_grad_guarded(self, *args, **kwargs) -> None:
        if self.guard is not None:
            self.guard.awaits_zero_grad = self.guard.adds_to_used = False
            complete_interrupted_sync(self.sync)  # otherwise, its gradients would be in buckets, and come back later
        zero_grad(self, *args, **kwargs)

    wrapper_class.step, wrapper_class.zero_grad = step_guarded, zero_grad_guarded


def complete_interrupted_sync(sync) -> None:
    """Complete what a backward() has begun that an exception has ended, because other ranks may wait for it."""
    if is_interrupted(sync):
        complete_interrupted(sync, [parameter for bucket in sync.queue.buckets for parameter in bucket.parameters])


def _copy(wrapper: nn.Module, memo: dict) -> nn.Module:
    """Copy a wrapper. The copy communicates over the same group, because groups cannot be copied."""
    copied = memo[id(wrapper)] = type(wrapper).__new__(type(wrapper))
    guard = getattr(wrapper, "guard", None)
    if guard is not None and (group := guard.alarm.group) is not None:
        memo[id(group)] = group
    copied.__setstate__(copy.deepcopy(vars(wrapper), memo))
    return copied


def call_hook(on_gradient: Callable, parameter: nn.Parameter, *indices: int) -> None:
    """Call the method on_gradient(*indices) of a GradientSync for a gradient that backward() has completed.

    If it raises on this rank, all ranks raise. Without a guard, it is just called: chapter 10 has guards of its own. If
    an exception has ended the last backward(), what that one has begun is completed first.
    """
    sync = on_gradient.__self__
    complete_interrupted_sync(sync)
    guard = getattr(sync, "guard", None)
    if guard is None:
        return on_gradient(*indices)
    try:
        if not sync.pending:  # the first gradient of a step
            guard.reject_rivals(parameter)
            guard.adds_to_used = guard.awaits_zero_grad
            guard.check_unchanged()
        reject_gradient(parameter)
        guard.mark()
        queue, launched = sync.queue, sync.queue.launched
        if sync.enabled and indices[1] not in queue.missing[indices[0]]:
            raise RuntimeError(second_gradient(parameter))
        on_gradient(*indices)
        if guard.notes_versions:
            guard.note_versions([*queue.buckets[launched : queue.launched], queue.buckets[indices[0]]])
    except RuntimeError as error:
        error = as_a_wait(error, guard.alarm.group, OF_OTHERS, EQUALLY_OFTEN)
        guard.alarm.ring(error, functools.partial(abandon, sync))
