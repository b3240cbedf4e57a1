# Built by `make notebooks` from source/07_zero1/lab.py: edit that, not this.
"""Flat tensors that hold several parameters, or their gradients, and are sharded over the ranks.

FlatLayout knows where each parameter lies in a flat tensor, FlatParameter keeps parameters in one, and FlatGradients
keeps their gradients in another.
"""

import torch
import torch.distributed as dist
from torch import nn

from shared import guards
from solutions.async_collectives import launch_all_gather, reduce_scatter_


class FlatLayout:
    """Where each parameter lies in a flat tensor, and which shard of the flat tensor this rank owns.

    Parameters lie side by side, padded at the end to a multiple of the group's world size N. Rank r owns the r-th of N
    equal shards, which may begin and end in the middle of a parameter.

    Shape: flat tensors are [N · n], shards [n].
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        self.parameters, self.group = parameters, group
        self.numel = sum(parameter.numel() for parameter in parameters)

    @property
    def shard_shape(self) -> torch.Size:
        """The shape of one rank's shard: one dimension, ceil(numel / N) elements."""
        return torch.Size([-(-self.numel // dist.get_world_size(self.group))])

    def new_flat(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a flat tensor of zeros on the parameters' device, by default of their dtype."""
        padded_numel = dist.get_world_size(self.group) * self.shard_shape.numel()
        return self.parameters[0].new_zeros(padded_numel, dtype=dtype)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """View each parameter's slice of flat in the parameter's shape."""
        slices = flat[: self.numel].split([parameter.numel() for parameter in self.parameters])
        pairs = zip(slices, self.parameters, strict=True)
        return [flat_slice.view(parameter.shape) for flat_slice, parameter in pairs]

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View this rank's shard of flat."""
        return flat.view(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]


class FlatParameter:
    """Parameters of one dtype and device, moved side by side into one flat tensor.

    Each parameter stays the same nn.Parameter, but its memory becomes its slice of flat_param. `shard`, also an
    nn.Parameter, views this rank's shard of flat_param. This is what an optimizer updates.

    Shape: flat_param [N · n], padded at the end; shard [n], a view of flat_param.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        self.layout = FlatLayout(parameters, group)
        self.flat_param = self.layout.new_flat()
        for view, parameter in zip(self.layout.views(self.flat_param), parameters, strict=True):
            view.copy_(parameter.detach())
        self.shard = nn.Parameter(self.layout.shard_of(self.flat_param))
        self._alias_parameters()

    def launch_all_gather(self):
        """Launch an all-gather of every rank's shard into flat_param. Returns a handle with wait().

        Communication: one all-gather.
        """
        return launch_all_gather(self.flat_param, self.shard.detach(), self.layout.group)

    def _alias_parameters(self) -> None:
        """Make each parameter's memory its slice of flat_param."""
        views = self.layout.views(self.flat_param)
        for view, parameter in zip(views, self.layout.parameters, strict=True):
            parameter.data = view

    def __setstate__(self, state: dict) -> None:
        # deepcopy copies each tensor by itself, so the copies must be made to share memory again.
        self.__dict__.update(state)
        self.shard.data = self.layout.shard_of(self.flat_param)
        self._alias_parameters()


class FlatGradients:
    """The gradients of a flat parameter, side by side in the same layout: each .grad is a slice of one flat tensor."""

    def __init__(self, flat_parameter: FlatParameter):
        self.flat_parameter, self.layout = flat_parameter, flat_parameter.layout
        self.flat = self.layout.new_flat()
        # .data has a version of its own: changes of flat, such as clipping shard.grad, do not count.
        self.views = self.layout.views(self.flat.data)
        self.reset()

    def reset(self) -> None:
        """Fill the gradients with zeros, and drop the shard's mean gradient."""
        self.flat.fill_(guards.UNUSED)  # [Note: negative zeros]
        self.flat_parameter.shard.grad = None
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            parameter.grad = view

    def reduce(self) -> None:
        """Set shard.grad to the mean over the ranks. A second call changes nothing, except after model.zero_grad().

        Communication: one reduce-scatter.
        """
        if self.is_reduced():
            return
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.fill_(guards.UNUSED)  # [Note: negative zeros]
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        shard = reduce_scatter_(self.flat, self.layout.group)
        self.flat_parameter.shard.grad = shard.div_(dist.get_world_size(self.layout.group))
        self.reduced_version = self.views[0]._version  # torch counts the views' changes

    def send_nan(self) -> None:
        """Take part in reduce() on a rank that is about to raise an error (see shared/guards/alarms.py)."""
        reduce_scatter_(self.flat.fill_(torch.nan), self.layout.group)

    def holds_gradients(self) -> bool:
        """Tell whether any .grad is still a slice of the flat tensor. After model.zero_grad(), none is."""
        pairs = zip(self.layout.parameters, self.views, strict=True)
        return any(parameter.grad is view for parameter, view in pairs)

    def is_reduced(self) -> bool:
        """Tell whether shard.grad is the mean of the current gradients.

        Raises:
            RuntimeError: if it lacks a gradient, because backward has run since reduce().
        """
        if self.flat_parameter.shard.grad is None or not self.holds_gradients():
            return False
        pairs = zip(self.layout.parameters, self.views, strict=True)
        replaced = any(p.grad is not None and p.grad is not view for p, view in pairs)
        if replaced or self.views[0]._version != self.reduced_version:
            raise RuntimeError(
                "backward() has run after the gradients were reduced, and its gradients would be lost: "
                "call clip_grad_norm_() after the last backward(), and zero_grad() before the next one"
            )
        return True

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        # After deepcopy, the copied views do not share memory with the copied flat tensor.
        self.views = self.layout.views(self.flat.data)
