# Built by `make notebooks` from source/07_zero1/lab.py: edit that, not this.
"""ZeRO stage 1: every rank holds all parameters and gradients, and one shard of the optimizer state."""

import contextlib
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from shared import guards
from shared.guards import in_flight
from solutions.clipping import clip_shards_
from solutions.flat import FlatGradients, FlatParameter
from solutions.optimizer_state import gather_state, shard_state
from solutions.overlapped_ddp import GradientSync
from solutions.overlapped_flat import OverlappedGradients, flatten_into_buckets


def group_by_kind(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Split the trainable parameters into lists of one dtype and device each."""
    by_kind = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(by_kind.values())


def flatten_and_broadcast(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> list[FlatParameter]:
    """Flatten the trainable parameters, one flat parameter per dtype and device, with the values of the group's rank 0.

    Communication: one broadcast per flat parameter and per frozen parameter.
    """
    flat_parameters = [FlatParameter(same_kind, group) for same_kind in group_by_kind(parameters)]
    trained = [flat_parameter.flat_param for flat_parameter in flat_parameters]
    frozen = [parameter.detach() for parameter in parameters if not parameter.requires_grad]
    for tensor in (*trained, *frozen):
        with guards.contiguous(tensor) as packed:
            dist.broadcast(packed, group=group, group_src=0)
    return flat_parameters


class ShardedOptimizer(torch.optim.Optimizer):
    """Run optimizer_cls on this rank's shard of every flat parameter, then all-gather the updated parameters.

    Before step(), each flat parameter's shard.grad must hold the mean gradient. `inner` is the optimizer_cls that
    updates the shards. Its param groups mirror those of this optimizer. Settings such as lr must be the same on every
    rank: a scheduler that reads the loss needs the mean over the ranks.

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
        guards.reject_whole_tensor_updates(optimizer_cls, defaults)
        self.group, self.flatten = group, flatten
        self.flat_parameters: list[FlatParameter] = []
        # Built on an empty parameter, to learn its defaults: add_param_group() adds the real groups one by one.
        self.inner = optimizer_cls([{"params": [nn.Parameter(torch.empty(0))]}], **defaults)
        self.inner.param_groups.clear()
        self.pieces = guards.Pieces(self.inner)  # skips parameters that no rank has used
        super().__init__(guards.unshared(params), self.inner.defaults)
        self.pieces.watch(self.flat_parameters)

    def add_param_group(self, param_group: dict) -> None:
        """Flatten and shard more parameters.

        Communication: that of flatten().
        """
        super().add_param_group(param_group)
        param_group = self.param_groups[-1]  # with defaults for missing settings
        added = self.flatten(param_group["params"])
        self.flat_parameters += added
        shards = [flat_parameter.shard for flat_parameter in added]
        self.inner.add_param_group({**param_group, "params": shards})

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters and shards."""
        with in_flight.gradients_only():
            super().zero_grad(set_to_none)
        self.pieces.zero_grad(set_to_none)
        self.pieces.end_step(self.flat_parameters)

    def step(self) -> None:
        """Update this rank's shards and all-gather the others. Each shard.grad must hold the mean gradient.

        Communication: one all-gather per flat parameter.
        """
        self.update_parameters()

    def update_parameters(self) -> None:
        """Do what step() does. A subclass calls this, because super().step() would run torch's step hooks twice."""
        self.pieces.begin_step(self.flat_parameters)
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update({name: value for name, value in group.items() if name != "params"})
        self.inner.step()
        with record_function("ZeRO::all_gather"):
            works = [flat_parameter.launch_all_gather() for flat_parameter in self.flat_parameters]
            for work in works:
                work.wait()
        self.pieces.end_step(self.flat_parameters)

    _step_supports_amp_scaling = property(guards.reject_grad_scaler)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the mean gradient to a norm of at most max_norm, over all parameters. Returns the norm before."""
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
        are_cut = self.pieces.are_cut_anywhere(self.flat_parameters, self.group)
        for flat_parameter in self.flat_parameters:
            if are_cut:
                states = self.pieces.gather(flat_parameter, gather_state, to)
            else:
                shard_entries = self.inner.state.get(flat_parameter.shard, {})
                states = gather_state(flat_parameter.layout, shard_entries, to)
            for parameter, entries in states.items():
                state_dict["state"][index_of[parameter]] = entries
        return state_dict if to in (None, dist.get_rank(self.group)) else None

    def load_state_dict(self, state_dict: dict) -> None:
        """Keep this rank's shard of a full state, which may come from any number of ranks or a plain optimizer_cls.

        Raises:
            ValueError: if the state belongs to other parameters, or to another optimizer.
        """
        guards.reject_other_settings(state_dict["param_groups"], self.defaults)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        index_of = self._index_of(state_dict["param_groups"])
        for flat_parameter in self.flat_parameters:
            layout = flat_parameter.layout
            entries = [state_dict["state"].get(index_of[parameter], {}) for parameter in layout.parameters]
            self.pieces.load(flat_parameter, shard_state(layout, entries), entries)

    def _index_of(self, packed_groups: list[dict]) -> dict[nn.Parameter, int]:
        """Map each parameter to its index in a state dict, whose param groups are packed_groups."""
        return {
            parameter: index
            for group, packed in zip(self.param_groups, packed_groups, strict=True)
            for parameter, index in zip(group["params"], packed["params"], strict=True)
        }

    def finish_parameter_sync(self) -> None:
        """Wait until all parameters are complete, if their all-gathers overlap with what follows step()."""
        in_flight.wait_for(each for group in self.param_groups for each in group["params"])

    def __getstate__(self) -> dict:
        # This is for deepcopy: torch's own method drops attributes that it does not know.
        self.finish_parameter_sync()
        return self.__dict__


class ZeRO1(ShardedOptimizer):
    """ZeRO stage 1: an optimizer_cls whose state is sharded over the ranks of the group.

    step() averages the gradients of the ranks' backward passes, updates this rank's shard, and all-gathers the
    parameters. The optimizer must update each element by itself, as SGD, Adam and AdamW do. A gradient of None counts
    as zeros if another rank has one. Parameters that no rank has used stay as they are, and so does their state.
    Buffers, such as BatchNorm's, stay different on each rank. Until step(), a .grad is this rank's own: clip with
    clip_grad_norm_(). The next backward() overwrites it. Settings such as lr must agree.

    Args:
        module: The owner of the parameters. With it, a bucket is reduce-scattered during backward, and after step(),
            whoever reads a parameter waits for its all-gather. So each backward() except the last one before step()
            needs no_sync(), and all ranks skip the same batches. An older `p.data` needs finish_parameter_sync().

    Memory: with Adam in fp32, 4Ψ + 4Ψ + 8Ψ/N bytes for Ψ parameters on N ranks, and two receive buffers with a module.
    Communication: per step, one reduce-scatter and one all-gather per param group, dtype and device, or with a module
        per bucket: 2(N−1)/N · 4Ψ bytes sent per rank.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.1 and §7. Megatron-Core's overlap_param_gather does the same.
    """

    def __init__(
        self,
        params,
        optimizer_cls: type,
        group: dist.ProcessGroup | None = None,
        module: nn.Module | None = None,
        **defaults,
    ):
        self.gradients: list[FlatGradients] = []
        self.used_up = False  # whether the last step() has consumed the gradients
        self.overlaps, self.sync = module is not None, None  # for the last section of this lab
        clip_with = "this optimizer's clip_grad_norm_(max_norm)"
        self.guard = guards.Guard(group, clip_with=clip_with, has_hooks=self.overlaps)
        if module is not None:
            params = guards.all_parameters_of(module, params)
            self.guard.watch(module)
        super().__init__(params, optimizer_cls, self._flatten, group, **defaults)
        if module is not None:
            self._sync_in_backward(module)

    def _flatten(self, parameters: list[nn.Parameter]) -> list[FlatParameter]:
        """Flatten and broadcast parameters, and give each flat parameter its FlatGradients."""
        if self.overlaps:
            return self._flatten_into_buckets(parameters)
        self.guard.watch_list(parameters)
        flat_parameters = flatten_and_broadcast(parameters, self.group)
        self.guard.snapshot.flat_parameters += flat_parameters
        self.gradients += [FlatGradients(flat_parameter) for flat_parameter in flat_parameters]
        return flat_parameters

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Fill the gradients with zeros. They keep their memory, whatever set_to_none says: the collective needs it."""
        self.pieces.zero_grad(set_to_none)
        self._complete_skipped_batch()
        self.used_up = False
        for gradients in self.gradients:
            gradients.reset()

    def reduce_gradients(self) -> None:
        """Set every shard.grad to its mean over the ranks.

        Communication: one reduce-scatter per flat parameter; none if they have been reduced since zero_grad().
        Raises:
            RuntimeError: if zero_grad() was not called since the last step(), or backward() ran after clipping.
        """
        if self.overlaps:
            return self._finish_gradient_sync()
        if self.used_up and any(gradients.holds_gradients() for gradients in self.gradients):
            raise RuntimeError(
                "step() has already used these gradients: call this optimizer's zero_grad() before backward()"
            )
        self.used_up = False
        self.pieces.forget_dropped(self.flat_parameters)
        guarding = self.guard.synchronizing(guards.AtStep(self.gradients))
        with guarding, torch.no_grad(), record_function("ZeRO1::reduce_scatter"):
            for gradients in self.gradients:
                gradients.reduce()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Average the gradients and clip them; the next step() does not average them again."""
        self.reduce_gradients()
        return super().clip_grad_norm_(max_norm)

    def step(self, closure: Callable | None = None):
        """Average the gradients, update this rank's shard, and all-gather the parameters.

        Returns:
            The result of closure(), if there is one.
        """
        loss = closure() if closure else None
        self.reduce_gradients()
        self.update_parameters()
        self.used_up = True
        return loss

    def no_sync(self):
        """Let gradients accumulate. With a module, backward() reduces them unless it runs inside no_sync()."""
        return contextlib.nullcontext() if self.sync is None else self.sync.no_sync()

    def _flatten_into_buckets(self, parameters: list[nn.Parameter]) -> list[FlatParameter]:
        """Flatten and broadcast parameters, bucket by bucket."""
        if self.sync is not None:
            raise ValueError("this ZeRO1 has all parameters of its module: add others before you build it")
        flat_parameters = flatten_into_buckets(parameters, self.group)
        self.guard.snapshot.flat_parameters += flat_parameters
        self.gradients += [OverlappedGradients(each) for each in flat_parameters]
        return flat_parameters

    def _sync_in_backward(self, module: nn.Module) -> None:
        """Reduce-scatter buckets from the last layer to the first, and all-gather them from the first to the last."""
        index_of = {id(parameter): index for index, parameter in enumerate(module.parameters())}

        def first_index(bucket: FlatParameter | FlatGradients) -> int:
            return min(index_of[id(parameter)] for parameter in bucket.layout.parameters)

        self.flat_parameters.sort(key=first_index)
        self.gradients.sort(key=first_index, reverse=True)
        for previous, bucket in pairwise(self.gradients):
            bucket.previous = previous
        self.sync = GradientSync(self.gradients)
        guards.InBackward(self).attach(self.guard)

    def _finish_gradient_sync(self) -> None:
        """Launch the remaining reduce-scatters, and wait for all of them, unless clipping has already done so."""
        if not self.sync.enabled:
            raise RuntimeError("call step() and clip_grad_norm_() outside no_sync(): inside, gradients stay unreduced")
        is_clipped = not (self.used_up or self.sync.pending or self.sync.done)
        if not is_clipped or any(each.shard.grad is None for each in self.flat_parameters):
            with record_function("ZeRO1::reduce_scatter"):
                self.sync.finish()  # usually, the end of backward() has done it
        guards.reject_altered(self.gradients)
        without = [bucket.parameters[index] for bucket in self.gradients for index in bucket.without]
        self.pieces.forget(without)

    def _complete_skipped_batch(self) -> None:
        """Complete what an interrupted backward() has begun, and let the next step() expect another one."""
        if self.sync is not None:
            guards.complete_interrupted_sync(self.sync)
            self.sync.pending = self.sync.done = self.guard.pending = False
