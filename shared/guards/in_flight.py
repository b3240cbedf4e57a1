"""Parameters whose all-gather is in flight: whoever reads their values waits for it first.

After ZeRO-1's step, the next forward can begin while ranks still send each other the updated shards, if each layer
waits for its own parameters. Hooks of layers would not be enough: state_dict(), an evaluation of one layer, or an
average of the weights read parameters, too. So the parameter itself waits. While its all-gather is in flight, its class
is InFlightParameter. torch calls the `__torch_function__` of such a class instead of any function that gets one of
these parameters. There, we wait, and give the parameter its old class back. torch's UninitializedParameter changes its
class in the same way, when it gets a shape.

torch does not ask a parameter if C++ code unpacks it (torch.tensor(p), torch.func.grad, an extension that does not use
torch.ops), or if somebody reads the same memory by another tensor (a `p.data` from before the step). This cannot go
unnoticed: until the last element of a parameter in each shard is received, it is NaN.
"""

import threading
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from shared.guards.alarms import naming_the_wait
from shared.guards.tensors import name_of

_PROPERTIES = """_backward_hooks _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu is_cuda is_leaf
    is_meta is_nested is_quantized is_sparse itemsize layout nbytes ndim output_nr requires_grad retains_grad shape"""
_METHODS = """dim element_size get_device is_contiguous is_floating_point numel register_hook
    register_post_accumulate_grad_hook requires_grad_ size storage_offset stride"""
# What needs no values. is_complex() is not among them, because collectives call it before they unpack a tensor.
NEEDS_NO_VALUES = {
    *(getattr(Tensor, name) for name in _METHODS.split()),
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
    *(
        getattr(Tensor, name).__set__
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks", "requires_grad", "grad")
    ),
    *(getattr(Tensor, name).__delete__ for name in ("grad",)),
    torch.is_floating_point,
}


class InFlightParameter(nn.Parameter):
    """The class of a parameter while its all-gather is in flight."""

    all_gather_in_flight: "AllGatherInFlight"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in NEEDS_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for parameter in _in_flight_in((args, kwargs)):
            wait_for([parameter])
        return func(*args, **kwargs)  # with parameters that have their old class again

    def __deepcopy__(self, memo: dict):
        wait_for([self])
        return self.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: int):
        wait_for([self])
        return self.__reduce_ex__(protocol)


def _in_flight_in(value) -> Iterator[InFlightParameter]:
    if type(value) is InFlightParameter:
        yield value
    elif isinstance(value, dict):
        yield from _in_flight_in(tuple(value.values()))
    elif isinstance(value, list | tuple | set):
        for element in value:
            yield from _in_flight_in(element)


STEP_EQUALLY_OFTEN = "let all ranks call step() equally often, and look for an error of another rank"


class AllGatherInFlight:
    """An all-gather in flight, and the parameters that are complete after it.

    Args:
        work: the handle of the all-gather.
        parameters: whose values it sets. Until then, their class is InFlightParameter.
    """

    def __init__(self, work, parameters: list[nn.Parameter]):
        self.work, self.parameters, self.failed = work, parameters, False
        self.lock = threading.RLock()  # A handle may be waited for once, but checkpointing reads in autograd's thread.
        for parameter in parameters:
            parameter.all_gather_in_flight = self  # pyright: ignore[reportAttributeAccessIssue] (an attribute of its own)
            parameter.__class__ = InFlightParameter

    def wait(self) -> None:
        """Wait until the all-gather is complete. A second call returns at once.

        Raises:
            RuntimeError: if an earlier wait has failed or was interrupted, because the parameters are incomplete.
        """
        with self.lock:
            if self.work is None:
                return
            if self.failed:
                raise RuntimeError(
                    f"{name_of(self.parameters[0])} and others are incomplete, because the all-gather of their updated "
                    "values has failed: build the model and its optimizer again, and load the last checkpoint"
                )
            self.failed = True  # unless the next lines succeed
            with (
                record_function("ZeRO::wait_for_parameters"),
                naming_the_wait(None, self._describe, STEP_EQUALLY_OFTEN),
            ):
                self.work.wait()
            self.failed, self.work = False, None
            for parameter in self.parameters:
                parameter.__class__ = nn.Parameter
                del parameter.all_gather_in_flight  # pyright: ignore[reportAttributeAccessIssue] (an attribute of its own)

    def _describe(self) -> str:
        return f"the updated values of {name_of(self.parameters[0])} and others"


def wait_for(parameters: Iterable[nn.Parameter]) -> None:
    """Wait until the values of parameters are complete. Without anything in flight, this does nothing."""
    for parameter in parameters:
        if type(parameter) is InFlightParameter:
            parameter.all_gather_in_flight.wait()


def gradients_only():
    """Return a context for code that reads no parameter's values: torch calls no Python for those in flight."""
    return torch._C.DisableTorchFunctionSubclass()


def can_be_in_flight(parameters: Iterable[nn.Parameter]) -> bool:
    """Tell whether parameters can change their class. Those of a class of their own keep it."""
    return all(type(parameter) is nn.Parameter for parameter in parameters)


def last_elements(layout) -> Tensor:
    """Return where parameters end in each shard of another rank: indices of the flat tensor of a FlatLayout."""
    shard_numel, own = layout.shard_shape.numel(), dist.get_rank(layout.group)
    begin, indices = 0, set()
    for parameter in layout.parameters:
        end = begin + parameter.numel()
        if begin < end:
            shards = range(begin // shard_numel, (end - 1) // shard_numel + 1)
            indices |= {min(end, (shard + 1) * shard_numel) - 1 for shard in shards if shard != own}
        begin = end
    return torch.tensor(sorted(indices), dtype=torch.long, device=layout.parameters[0].device)


class NothingToWaitFor:
    """What an optimizer gets as the handle of an all-gather that its parameters wait for."""

    def wait(self) -> None:
        """Return at once."""
