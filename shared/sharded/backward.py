"""Backward of a sharded model: what autograd is computing, and in which cases the result would be wrong."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Variable

from shared.guards.alarms import Alarm, naming_the_wait
from shared.sharded.parameters import SAME_CALLS, describe


class OrderOfUnits:
    """Compares the order in which ranks call their units, in the first step, and says which unit one waits for.

    A unit's all-gather has no name: on ranks that call units of equal sizes in different orders, it would mix them.
    """

    def __init__(self, group: dist.ProcessGroup | None):
        self.group, self.is_compared = group, False

    def waiting_after(self, prefetcher):
        """Return a context for a forward, which waits for the unit after those that a prefetcher lists in `called`."""

        def what() -> str:
            return (
                f"the unit after {_name(prefetcher.called[-1])}" if prefetcher.called else "the first unit of a forward"
            )

        return naming_the_wait(self.group, what, SAME_CALLS)

    def waiting_for(self, unit):
        """Return a context for code that waits until a unit is unsharded."""
        return naming_the_wait(self.group, lambda: _name(unit), SAME_CALLS)

    def expect_same(self, called: Iterable) -> None:
        """Raise a ValueError on every rank if they have called other units, or in another order.

        Communication: in the first call, one all-gather of two integers, which the ledger does not see.
        """
        if self.is_compared:
            return
        self.is_compared = True
        units = [unit for unit in called if unit.flat_parameters]
        device = units[0].flat_parameters[0].shard.device if units else torch.device("cpu")
        advice = "All ranks must call the same units in the same order, because their parameters are gathered in it"
        Alarm(self.group).compare(list(map(_name, units)) or ["no unit"], device, "calls of units", advice)


def _name(unit) -> str:
    flat_parameters = unit.flat_parameters
    return f"the unit with {describe(flat_parameters[0].layout.parameters[0])}" if flat_parameters else "an empty unit"


class Backward:
    """Follows autograd: when backward begins and ends, and whose gradients it computes.

    Args:
        at_end: called when backward has computed its last gradient.
    """

    def __init__(self, at_end: Callable[[], None]):
        self.at_end = at_end
        self.runs = False
        self.is_for_inputs = False  # as in autograd.grad(loss, x): it needs no gradient of a parameter
        self.witness = torch.empty(0, requires_grad=True)  # an input of each unit, which stands for its parameters

    def begin(self) -> None:
        """Note that backward has reached a unit."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True is not supported, because collectives do not record a graph: compute a gradient "
                "penalty with the module itself, before you wrap it"
            )
        if not self.runs:
            self.runs, self.is_for_inputs = True, False
            Variable._execution_engine.queue_callback(self._end)

    def is_for_parameters(self) -> bool:
        """Tell whether this backward computes gradients of parameters. Call this in a backward only."""
        witness = torch.autograd.graph.get_gradient_edge(self.witness).node
        is_for_parameters = torch._C._will_engine_execute_node(witness)
        self.is_for_inputs = self.is_for_inputs or not is_for_parameters
        return is_for_parameters

    def _end(self) -> None:
        self.runs = False
        self.at_end()

    def was_interrupted(self) -> bool:
        """Tell, when forward begins, whether an error has ended the last backward. A second call returns False."""
        is_in_backward = torch._C._current_graph_task_id() != -1  # checkpointing runs a forward again
        interrupted = self.runs and not is_in_backward
        self.runs = self.runs and is_in_backward
        return interrupted


class ForwardBegin:
    """The moment at which a unit's forward begins.

    Args:
        flat_parameters: those of the unit.
        inputs: what the unit is called with.

    Raises:
        RuntimeError: inside torch.func.grad() and the like.
    """

    def __init__(self, flat_parameters: list, inputs: object = ()):
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "torch.func's transforms, such as grad(), are not supported, because the gradients of a "
                "sharded model are complete only after finish_gradient_sync(): call them on the module itself, before "
                "you wrap it"
            )
        self.flat_parameters = flat_parameters
        self.without_gradient = [tensor for tensor in tensors_in(inputs) if not tensor.requires_grad]
        self.versions = self._versions_now()
        # torch numbers the nodes of a graph.
        self.sequence_number = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue] (has no stub)

    def _versions_now(self) -> list[int]:
        return [flat_parameter.shard._version for flat_parameter in self.flat_parameters]

    def expect_same_parameters(self) -> None:
        """Raise a RuntimeError if the unit's parameters have changed since."""
        if self.versions != self._versions_now():
            raise RuntimeError(
                f"{describe(self.flat_parameters[0].layout.parameters[0])} has changed since this forward, for example "
                "in optimizer.step(), so its gradients would be wrong: run forward again before backward()"
            )

    def tensors_of(self, output) -> Iterator[Tensor]:
        """Yield the tensors that autograd passes before it reaches the unit that returned this output.

        The unit may have written results into its inputs, as into an `out` of its caller. Then, these have a graph now.
        """
        inputs, self.without_gradient = self.without_gradient, []  # this object stays alive until backward
        for tensor in dict.fromkeys((*tensors_in(output), *inputs)):
            if tensor.requires_grad:
                yield tensor
                # If somebody changes a view in place, backward passes its base, but not the view itself.
                base = tensor._base
                node = None if base is None else base.grad_fn
                if base is not None and node is not None and node._sequence_nr() >= self.sequence_number:
                    yield base


def tensors_in(value, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield the tensors in a unit's output: in containers, dataclasses and other objects."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, str | bytes | int | float | torch.nn.Module | type) or value is None or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list | tuple | set):
        parts = value
    elif dataclasses.is_dataclass(value):
        parts = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    else:
        parts = getattr(value, "__dict__", {}).values()
    for part in parts:
        yield from tensors_in(part, seen)
