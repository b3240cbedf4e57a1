# Built by `make notebooks` from source/07_zero1/lab.py: edit that, not this.
"""ZeRO stage 1: every rank holds all parameters and gradients, and one shard of the optimizer state."""

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from solutions.clipping import clip_shards_
from solutions.collectives import launch_all_gather, reduce_scatter_
from solutions.flat import FlatLayout
from solutions.optimizer_state import gather_state, shard_state


class FlatParameter:
    """Parameters of one dtype and device, moved side by side into one flat tensor.

    The parameters stay what they were; their memory becomes slices of flat_param. `shard`, an nn.Parameter, is this
    rank's shard of flat_param: the one that an optimizer updates.

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
        # deepcopy copies each tensor by itself; the copies must share memory again.
        self.__dict__.update(state)
        self.shard.data = self.layout.shard_of(self.flat_param)
        self._alias_parameters()


class FlatGradients:
    """The gradients of a flat parameter, side by side in the same layout: each .grad is a slice of one flat tensor."""

    def __init__(self, flat_parameter: FlatParameter):
        self.flat_parameter, self.layout = flat_parameter, flat_parameter.layout
        self.flat = self.layout.new_flat()
        self.views = self.layout.views(self.flat)
        self.reset()

    def reset(self) -> None:
        """Fill the gradients with zeros, and drop the shard's mean gradient."""
        self.flat.zero_()
        self.flat_parameter.shard.grad = None
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            parameter.grad = view

    def reduce(self) -> None:
        """Set shard.grad to the mean over the ranks. A second call before reset() changes nothing.

        Communication: one reduce-scatter.
        """
        if self.flat_parameter.shard.grad is not None and self.holds_gradients():
            return
        for parameter, view in zip(self.layout.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view
        shard = reduce_scatter_(self.flat, self.layout.group)
        self.flat_parameter.shard.grad = shard.div_(dist.get_world_size(self.layout.group))

    def holds_gradients(self) -> bool:
        """Tell whether any .grad is still a slice of the flat tensor; model.zero_grad() detaches them."""
        pairs = zip(self.layout.parameters, self.views, strict=True)
        return any(parameter.grad is view for parameter, view in pairs)

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        # deepcopy again: the copied views do not share memory with flat.
        self.views = self.layout.views(self.flat)


def group_by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split trainable parameters into lists of one dtype and device each."""
    by_kind = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(by_kind.values())


def flatten_and_broadcast(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> list[FlatParameter]:
    """Flatten the trainable parameters, one flat parameter per dtype and device, with the values of the group's rank 0.

    Communication: one broadcast per flat parameter and per frozen parameter.
    """
    flat_parameters = [FlatParameter(alike, group) for alike in group_by_kind(parameters)]
    frozen = [parameter.detach() for parameter in parameters if not parameter.requires_grad]
    for tensor in (*(each.flat_param for each in flat_parameters), *frozen):
        dist.broadcast(tensor, group=group, group_src=0)
    return flat_parameters


class ShardedOptimizer(torch.optim.Optimizer):
    """Run optimizer_cls on this rank's shard of every flat parameter, then all-gather the updated parameters.

    Before step(), each flat parameter's shard.grad must hold the mean gradient. `inner` is the optimizer_cls on shards;
    its param groups mirror this optimizer's.

    Args:
        flatten: turns the parameters of one param group into flat parameters.

    Memory: with Adam in fp32, 8/N bytes of state per parameter.
    """

    def __init__(
        self,
        params,
        optimizer_cls: type,
        flatten: Callable[[list[nn.Parameter]], list[FlatParameter]],
        group: dist.ProcessGroup | None = None,
        **defaults,
    ):
        self.group, self.flatten = group, flatten
        self.flat_parameters: list[FlatParameter] = []
        # Built on an empty parameter, for the defaults: add_param_group() adds the real groups one by one.
        self.inner = optimizer_cls([{"params": [nn.Parameter(torch.empty(0))]}], **defaults)
        self.inner.param_groups.clear()
        super().__init__(params, self.inner.defaults)

    def add_param_group(self, param_group: dict) -> None:
        """Flatten and shard more parameters.

        Communication: that of flatten().
        """
        super().add_param_group(param_group)
        settings = self.param_groups[-1]
        added = self.flatten(settings["params"])
        self.flat_parameters += added
        shards = [flat_parameter.shard for flat_parameter in added]
        self.inner.add_param_group({**settings, "params": shards})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters and shards."""
        super().zero_grad(set_to_none)
        for flat_parameter in self.flat_parameters:
            flat_parameter.shard.grad = None

    def step(self) -> None:
        """Update this rank's shards and all-gather the others. Each shard.grad must hold the mean gradient.

        Communication: one all-gather per flat parameter.
        """
        self.update_parameters()

    def update_parameters(self) -> None:
        """Do what step() does, without running step()'s hooks: a subclass's own step() has run them."""
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update({name: value for name, value in group.items() if name != "params"})
        self.inner.step()
        with record_function("ZeRO::all_gather"):
            for work in [each.launch_all_gather() for each in self.flat_parameters]:
                work.wait()
        for flat_parameter in self.flat_parameters:
            flat_parameter.shard.grad = None

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the mean gradient so that its norm over all parameters is at most max_norm. Returns the norm before."""
        gradients = [flat_parameter.shard.grad for flat_parameter in self.flat_parameters]
        return clip_shards_(gradients, max_norm, self.group)

    def state_dict(self, to: int | None = None) -> dict | None:
        """Gather the state that optimizer_cls alone would have. All ranks must call this.

        Args:
            to: the group rank that gets the state, while the others get None; by default, all ranks get it.

        Communication: one gather, or all-gather, per sharded tensor of state.
        """
        state_dict = super().state_dict()
        index_of = self._index_of(state_dict["param_groups"])
        for flat_parameter in self.flat_parameters:
            shard_entries = self.inner.state.get(flat_parameter.shard, {})
            states = gather_state(flat_parameter.layout, shard_entries, to)
            for parameter, entries in states.items():
                state_dict["state"][index_of[parameter]] = entries
        return state_dict if to in (None, dist.get_rank(self.group)) else None

    def load_state_dict(self, state_dict: dict) -> None:
        """Keep this rank's shard of a full state, which may come from any number of ranks or a plain optimizer_cls.

        Raises:
            ValueError: if the state belongs to other parameters.
        """
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        index_of = self._index_of(state_dict["param_groups"])
        for flat_parameter in self.flat_parameters:
            layout = flat_parameter.layout
            entries = [state_dict["state"].get(index_of[parameter], {}) for parameter in layout.parameters]
            self.inner.state[flat_parameter.shard] = shard_state(layout, entries)

    def _index_of(self, packed_groups: list[dict]) -> dict[nn.Parameter, int]:
        return {
            parameter: index
            for group, packed in zip(self.param_groups, packed_groups, strict=True)
            for parameter, index in zip(group["params"], packed["params"], strict=True)
        }

    def __getstate__(self) -> dict:
        return self.__dict__  # for deepcopy: torch's own version drops attributes it does not know


class ZeRO1(ShardedOptimizer):
    """ZeRO stage 1: an optimizer_cls whose state is sharded over the ranks of the group.

    step() averages the gradients that each rank's own backward() left, updates this rank's shard, and all-gathers the
    parameters. For optimizers that treat each element by itself (SGD, Adam, AdamW, …). A gradient of None counts as
    zeros.

    Memory: with Adam in fp32, 4Ψ + 4Ψ + 8Ψ/N bytes for Ψ parameters on N ranks.
    Communication: per step, one reduce-scatter and one all-gather per param group, dtype and device:
        2(N−1)/N · 4Ψ bytes sent per rank.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.1 and §7.
    """

    def __init__(self, params, optimizer_cls: type, group: dist.ProcessGroup | None = None, **defaults):
        self.gradients: list[FlatGradients] = []
        self.used_up = False  # whether the last step() has consumed the gradients
        super().__init__(params, optimizer_cls, self._flatten, group, **defaults)

    def _flatten(self, parameters: list[nn.Parameter]) -> list[FlatParameter]:
        flat_parameters = flatten_and_broadcast(parameters, self.group)
        self.gradients += [FlatGradients(flat_parameter) for flat_parameter in flat_parameters]
        return flat_parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill the gradients with zeros. They keep their memory, which the reduce-scatter uses, in either case."""
        self.used_up = False
        for gradients in self.gradients:
            gradients.reset()

    def reduce_gradients(self) -> None:
        """Set every shard.grad to its mean over the ranks.

        Communication: one reduce-scatter per flat parameter; none if they have been reduced since zero_grad().
        Raises:
            RuntimeError: if zero_grad() was not called since the last step().
        """
        if self.used_up and any(gradients.holds_gradients() for gradients in self.gradients):
            raise RuntimeError(
                "step() has already used these gradients: call this optimizer's zero_grad() before backward()"
            )
        self.used_up = False
        with torch.no_grad(), record_function("ZeRO1::reduce_scatter"):
            for gradients in self.gradients:
                gradients.reduce()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Average the gradients and clip them; the next step() does not average them again."""
        self.reduce_gradients()
        return super().clip_grad_norm_(max_norm)

    def step(self, closure: Callable | None = None):
        """Average the gradients, update this rank's shard, and all-gather the parameters.

        Returns:
            What closure() returned.
        """
        loss = closure() if closure else None
        self.reduce_gradients()
        self.update_parameters()
        self.used_up = True
        return loss
