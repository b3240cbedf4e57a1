"""Optimizer state for each parameter of a shard, as soon as a parameter is left out of a step.

In one process, an optimizer leaves out a parameter without a gradient: no weight decay, no momentum, and Adam's step
count for it stays. A sharded optimizer updates this rank's shard of a flat parameter as one tensor, with one step count
for all parameters in it. That is right until a parameter is unused on all ranks, or a state is loaded in which the
parameters' step counts differ. From then on, the optimizer gets the shard in pieces, one for each parameter.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shared.guards.alarms import Alarm
from shared.guards.in_flight import wait_for
from shared.guards.unused import is_unused


class Pieces:
    """Lets an inner optimizer skip parameters that no rank has used.

    Args:
        inner: the optimizer of the shards. It gets pieces instead of a shard when they are needed.
    """

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner = inner
        self.pieces_of: dict[Any, dict[int, nn.Parameter]] = {}  # by flat parameter, and by index of the parameter
        self._begin()

    def _begin(self) -> None:
        self.used: set[int] = set()  # the ids of parameters whose .grad would not be None in one process
        self.slices_of: dict[object, dict[int, slice]] = {}  # where parameters lie in this rank's shard

    # Steps

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget which parameters have gradients. Without set_to_none, these are zeros now, and a step uses them."""
        if set_to_none:
            self.used.clear()

    def forget_dropped(self, flat_parameters: Iterable) -> None:
        """Forget gradients that have been set to None, for example by model.zero_grad()."""
        parameters = (parameter for flat_parameter in flat_parameters for parameter in flat_parameter.layout.parameters)
        self.forget(parameter for parameter in parameters if parameter.grad is None)

    def forget(self, parameters: Iterable[nn.Parameter]) -> None:
        """Forget that these parameters have got a gradient."""
        self.used -= set(map(id, parameters))

    def watch(self, flat_parameters: Iterable) -> None:
        """Notice from now on which parameters get a gradient."""
        for flat_parameter in flat_parameters:
            self._slices(flat_parameter)

    def begin_step(self, flat_parameters: Iterable) -> None:
        """Give the pieces their gradients, or None. Every shard.grad must be a mean.

        This reads the mean only where parameters got no gradient on this rank. On a GPU, the CPU then waits for it.
        """
        for flat_parameter in flat_parameters:
            parameters = flat_parameter.layout.parameters
            wait_for(parameters)  # If nobody has read them since the last step, their shards may still be in flight.
            torch.autograd.graph.increment_version(parameters)  # of a graph from before this step, backward() raises
            mean, unused = flat_parameter.shard.grad, self._unused_in(flat_parameter)
            self.used |= {id(parameters[index]) for index in self.slices_of[flat_parameter].keys() - unused}
            if unused:
                self._cut(flat_parameter)
            for index, piece in self.pieces_of.get(flat_parameter, {}).items():
                own = self.slices_of[flat_parameter][index]
                piece.grad = None if mean is None or index in unused else mean[own]

    def end_step(self, flat_parameters: Iterable) -> None:
        """Drop all gradients of shards and pieces."""
        for flat_parameter in flat_parameters:
            for tensor in (flat_parameter.shard, *self.pieces_of.get(flat_parameter, {}).values()):
                tensor.grad = None

    def _unused_in(self, flat_parameter) -> set[int]:
        """Return the indices of parameters that no rank has used: see [Note: negative zeros] in `unused`."""
        slices, mean, used = self._slices(flat_parameter), flat_parameter.shard.grad, self.used
        if mean is None or mean.is_meta:
            return set()
        parameters = flat_parameter.layout.parameters
        maybe = {index: own for index, own in slices.items() if id(parameters[index]) not in used}
        firsts = mean[[own.start for own in maybe.values()]].tolist() if maybe else []
        return {
            index
            for (index, own), first in zip(maybe.items(), firsts, strict=True)
            if first == 0 and math.copysign(1, first.real) < 0 and is_unused(mean[own])
        }

    def _slices(self, flat_parameter) -> dict[int, slice]:
        if flat_parameter not in self.slices_of:
            mark = self.used.add  # A hook that held this object would keep it alive.
            for parameter in flat_parameter.layout.parameters:
                hook = parameter.register_post_accumulate_grad_hook(lambda computed: mark(id(computed)))
                weakref.finalize(self, hook.remove)
            self.slices_of[flat_parameter] = _own_slices(flat_parameter.layout, flat_parameter.shard.numel())
        return self.slices_of[flat_parameter]

    # States

    def _cut(self, flat_parameter) -> None:
        """Give the inner optimizer pieces instead of a shard. Each continues with the shard's state."""
        shard, slices = flat_parameter.shard, self._slices(flat_parameter)
        if flat_parameter not in self.pieces_of:
            pieces = {index: nn.Parameter(shard.data[own]) for index, own in slices.items()}
            self.pieces_of[flat_parameter] = pieces
            for group in self.inner.param_groups:
                group["params"] = [new for p in group["params"] for new in (pieces.values() if p is shard else [p])]
        state = self.inner.state.pop(shard, {})
        for index, piece in self.pieces_of[flat_parameter].items() if state else ():
            self.inner.state[piece] = {
                name: value[slices[index]] if _is_per_element(value, shard) else _copy(value)
                for name, value in state.items()
            }

    def load(self, flat_parameter, state: dict, entries_of: list[dict]) -> None:
        """Load a state. If parameters differ in an entry that a shard has once, such as Adam's step, cut the shard.

        Args:
            state: this rank's shard of the state.
            entries_of: the whole state of each parameter.
        """
        shared = [name for name, value in state.items() if not _is_per_element(value, flat_parameter.shard)]
        known = [{name: entries.get(name) for name in shared} for entries in entries_of]
        self.inner.state[flat_parameter.shard] = state
        same = all(bool(entries) == bool(entries_of[0]) for entries in entries_of) and all(
            _equal(values[name], known[0][name]) for values in known for name in shared
        )
        if same and flat_parameter not in self.pieces_of:
            return
        self._cut(flat_parameter)
        for index, piece in self.pieces_of[flat_parameter].items():
            if entries_of[index]:
                self.inner.state[piece].update({name: _copy(value) for name, value in known[index].items()})
            else:
                self.inner.state.pop(piece, None)

    def are_cut_anywhere(self, flat_parameters: list, group: dist.ProcessGroup | None) -> bool:
        """Tell whether any rank has cut a shard. All ranks must call this.

        Communication: one all-gather of two integers, which the ledger does not see.
        """
        if not flat_parameters:
            return False
        return any(cut for cut, _ in Alarm(group).gather([bool(self.pieces_of), 0], flat_parameters[0].shard.device))

    def gather(self, flat_parameter, gather: Callable, to: int | None = None) -> dict[nn.Parameter, dict]:
        """Gather the state of each parameter, if a rank has cut a shard. All ranks must call this.

        Args:
            gather: gathers a state of shards, as gather_state() of chapter 07.
            to: the group rank that gets the state; by default, all ranks.

        Communication: that of gather(), and one all-gather of what is not per element.
        """
        self._cut(flat_parameter)
        layout = flat_parameter.layout
        described: list[Any] = [None] * dist.get_world_size(layout.group)
        dist.all_gather_object(described, self._described(flat_parameter), group=layout.group)
        known = {index: entries for each in described for index, entries in each.items() if entries}
        dtypes = {name: value for entries in known.values() for name, value in entries.items() if _is_dtype(value)}
        full = gather(layout, {name: self._whole(flat_parameter, name, dtype) for name, dtype in dtypes.items()}, to)
        states = {}
        for index, entries in known.items():
            own = full.get(layout.parameters[index], {})
            states[layout.parameters[index]] = {
                name: own.get(name) if _is_dtype(value) else value for name, value in entries.items()
            }
        return states

    def _described(self, flat_parameter) -> dict[int, dict]:
        """Return the state of each piece, with a dtype in place of an entry that has a value for each element."""
        return {
            index: {
                name: value.dtype if _is_per_element(value, piece) else value
                for name, value in self.inner.state.get(piece, {}).items()
            }
            for index, piece in self.pieces_of[flat_parameter].items()
        }

    def _whole(self, flat_parameter, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Put an entry of all pieces into one tensor, which has the shard's shape. Zeros are for what lacks it."""
        whole = torch.zeros_like(flat_parameter.shard, dtype=dtype, requires_grad=False)
        for index, piece in self.pieces_of[flat_parameter].items():
            if name in (state := self.inner.state.get(piece, {})):
                whole[self._slices(flat_parameter)[index]] = state[name]
        return whole

    # Copies

    def __getstate__(self) -> dict:
        return {"inner": self.inner, "pieces_of": self.pieces_of}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)  # of a copy, whose pieces do not share memory with its shards
        self._begin()
        for flat_parameter, pieces in self.pieces_of.items():
            for index, piece in pieces.items():
                piece.data = flat_parameter.shard.data[self._slices(flat_parameter)[index]]


def _own_slices(layout, shard_numel: int) -> dict[int, slice]:
    """Return where parameters lie in this rank's shard, by index, for those that have an element there."""
    slices, begin = {}, -dist.get_rank(layout.group) * shard_numel
    for index, parameter in enumerate(layout.parameters):
        end = begin + parameter.numel()
        if max(begin, 0) < min(end, shard_numel):
            slices[index] = slice(max(begin, 0), min(end, shard_numel))
        begin = end
    return slices


def _is_per_element(value, of: torch.Tensor) -> bool:
    return torch.is_tensor(value) and value.shape == of.shape


def _is_dtype(value) -> bool:
    return isinstance(value, torch.dtype)


def _copy(value):
    return value.clone() if torch.is_tensor(value) else value


def _equal(one, other) -> bool:
    if torch.is_tensor(one) and torch.is_tensor(other):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other
