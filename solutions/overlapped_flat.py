# Built by `make notebooks` from source/07_zero1/lab.py: edit that, not this.
"""Flat parameters and gradients whose collectives overlap with forward and backward: buckets of chapter 07's ZeRO1."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from shared import guards
from shared.guards import in_flight
from solutions.async_collectives import launch_reduce_scatter
from solutions.bucketed_ddp import MB, assign_buckets
from solutions.flat import FlatGradients, FlatParameter

LEAST_CAP_MB = 1.0  # smaller buckets would cost more latency than they hide
LEAST_IN_FLIGHT_MB = 0.5  # a smaller all-gather takes less than letting the parameters wait


class OverlappedFlatParameter(FlatParameter):
    """A flat parameter whose all-gather overlaps with what follows: whoever reads a parameter waits for it."""

    def launch_all_gather(self):
        """Launch an all-gather, and let the parameters wait for it. Returns a handle whose wait() returns at once.

        Communication: one all-gather.
        """
        parameters = self.layout.parameters
        in_flight.wait_for(parameters)
        is_small = self.flat_param.nbytes < LEAST_IN_FLIGHT_MB * MB
        if is_small or not in_flight.can_be_in_flight(parameters):
            return super().launch_all_gather()
        # Who reads them in another way, and does not wait, gets NaN (see shared/guards/in_flight.py).
        self.flat_param[in_flight.last_elements(self.layout)] = math.nan
        in_flight.AllGatherInFlight(super().launch_all_gather(), parameters)
        return in_flight.NothingToWaitFor()

    def __getstate__(self) -> dict:
        in_flight.wait_for(self.layout.parameters)
        return self.__dict__


def flatten_into_buckets(
    parameters: list[nn.Parameter], group: dist.ProcessGroup | None
) -> list[OverlappedFlatParameter]:
    """Flatten trainable parameters, one flat parameter per bucket, with the values of the group's rank 0.

    A bucket holds at most an eighth of the parameters, so that collectives overlap, but LEAST_CAP_MB to 25 MB.

    Communication: one broadcast per parameter.
    """
    for parameter in parameters:
        with guards.contiguous(parameter) as packed:
            dist.broadcast(packed, group=group, group_src=0)
    eighth_mb = sum(parameter.nbytes for parameter in parameters) / 8 / MB
    buckets = assign_buckets(parameters, min(max(eighth_mb, LEAST_CAP_MB), 25.0))
    return [OverlappedFlatParameter(bucket, group) for bucket in buckets]


class OverlappedGradients(FlatGradients):
    """The gradients of a bucket, reduce-scattered during backward. It has the methods that a LaunchQueue calls."""

    def __init__(self, flat_parameter: FlatParameter):
        self.parameters = flat_parameter.layout.parameters
        self.previous: OverlappedGradients | None = None  # the bucket that is launched before this one
        self.in_flight = None  # the handle of the reduce-scatter
        super().__init__(flat_parameter)
        self._view_gradients()
        self.reset()

    def reset(self) -> None:
        """Fill the gradients with zeros, and drop the shard's mean gradient."""
        super().reset()
        self.is_overwritten = False  # by a reduce-scatter: nothing may be added to these gradients
        self.reduced_version = None  # how often the gradients had been changed when they were reduced
        self.without: set[int] = set()  # the indices of parameters that had no gradient then

    def reject_stale(self, index: int) -> None:
        """Raise a RuntimeError if a gradient was added to what a reduce-scatter has left behind."""
        if self.is_overwritten and self.parameters[index].grad is self.views[index]:
            raise RuntimeError(guards.stale_gradient(self.parameters[index]))

    def pack(self, index: int) -> None:
        """Copy the gradient of parameters[index] into its view, if it is another tensor; None counts as zeros."""
        self.reject_stale(index)
        parameter, view = self.parameters[index], self.views[index]
        with torch.no_grad():
            if parameter.grad is None:
                view.fill_(guards.UNUSED)  # [Note: negative zeros]
                self.without.add(index)
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
        parameter.grad = view

    def launch(self) -> None:
        """Launch this bucket's reduce-scatter, and wait for the previous one, whose receive buffer is free then.

        Communication: one reduce-scatter.
        """
        with record_function("ZeRO1::reduce_scatter"):
            # .data has a version of its own: the guards notice when somebody else changes the gradients.
            self.in_flight = launch_reduce_scatter(self.flat.data, self.layout.group)
        if self.previous is not None:
            self.previous.wait()  # Only now, so that the link has something to send while this rank adds up.

    def wait(self) -> None:
        """Set shard.grad to the mean over the ranks, if a reduce-scatter is in flight."""
        if self.in_flight is not None:
            shard = self.in_flight.wait()
            self.flat_parameter.shard.grad = shard.div_(dist.get_world_size(self.layout.group))
            self.in_flight, self.is_overwritten = None, True
            self.reduced_version = self.flat._version

    def _view_gradients(self) -> None:
        self.views = self.layout.views(self.flat)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._view_gradients()
        self.reduced_version = self.flat._version
