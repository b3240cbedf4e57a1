"""How many tokens each expert gets on `meta`, where a router computes no values: as many as every other expert."""

import contextlib
from unittest import mock

import torch


@contextlib.contextmanager
def balanced_routing():
    """Answer what a layer of experts asks about the values of its counts on `meta`.

    A router counts its assignments with bincount(). All lists of counts that follow from these, by expert or by rank,
    have the same sum if all experts of all ranks get equally many. So tolist() divides this sum evenly, and
    repeat_interleave() with such counts returns a tensor of this length.

    The methods are replaced, because a mode of torch would be off while backward recomputes a layer.
    """
    bincount, tolist = torch.Tensor.bincount, torch.Tensor.tolist
    repeat_interleave = torch.Tensor.repeat_interleave
    assignments = 0

    def count(tensor: torch.Tensor, *args, minlength: int = 0, **kwargs):
        nonlocal assignments
        if not tensor.is_meta:
            return bincount(tensor, *args, minlength=minlength, **kwargs)
        assignments = tensor.numel()
        return tensor.new_empty(minlength)

    def divide(tensor: torch.Tensor):
        if not tensor.is_meta:
            return tolist(tensor)
        share, more = divmod(assignments, tensor.numel())
        return [share + (index < more) for index in range(tensor.numel())]

    def repeat(tensor: torch.Tensor, repeats, *args, **kwargs):
        if not (tensor.is_meta and isinstance(repeats, torch.Tensor)):
            return repeat_interleave(tensor, repeats, *args, **kwargs)
        return tensor.new_empty(assignments)

    methods = {"bincount": count, "tolist": divide, "repeat_interleave": repeat}
    with mock.patch.multiple(torch.Tensor, **methods):
        yield
