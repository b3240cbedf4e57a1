# Built by `make notebooks` from source/08_zero2/lab.py: edit that, not this.
"""ZeRO stage 2: every rank holds all parameters, and one shard of the gradients and of the optimizer state."""

from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from shared import guards
from solutions.async_collectives import launch_reduce_scatter
from solutions.bucketed_ddp import assign_buckets
from solutions.flat import FlatParameter
from solutions.manual_ddp import broadcast_state
from solutions.overlapped_ddp import GradientSync
from solutions.overlapped_flat import OverlappedFlatParameter
from solutions.zero1 import ShardedOptimizer


class ShardedBucket:
    """The gradients of a flat parameter, held in full only until they are reduce-scattered.

    `flat` is the flat tensor of gradients, or None while no gradient is packed; `in_flight` is the reduce-scatter's
    handle, or None.
    """

    def __init__(self, flat_parameter: FlatParameter):
        self.flat_parameter, self.layout = flat_parameter, flat_parameter.layout
        self.parameters = self.layout.parameters
        self.previous: ShardedBucket | None = None  # the bucket that is launched before this one
        self.flat = self.views = self.in_flight = None

    def pack(self, index: int) -> None:
        """Move the gradient of parameters[index] into the flat tensor; None counts as zeros.

        Raises:
            RuntimeError: for a gradient that is itself differentiable.
        """
        if self.flat is None:
            self.flat = self.layout.new_flat().fill_(guards.UNUSED)  # [Note: negative zeros]
            self.views = self.layout.views(self.flat)
        parameter = self.parameters[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return  # it may be packed already
        if gradient.requires_grad:
            raise RuntimeError("backward(create_graph=True) cannot be averaged: collectives do not record a graph")
        torch.div(gradient, dist.get_world_size(self.layout.group), out=self.views[index])

    def launch(self) -> None:
        """Wait for the previous bucket's reduce-scatter, so that few buckets are alive at once, and launch this one's.

        Communication: one reduce-scatter.
        """
        if self.previous is not None:
            self.previous.wait()
        with record_function("ZeRO::reduce_scatter"):
            self.in_flight = launch_reduce_scatter(self.flat, self.layout.group)

    def wait(self) -> None:
        """Add this rank's shard of the mean gradient to shard.grad, and free the flat tensor, if it is in flight."""
        if self.in_flight is None:
            return
        mean = self.in_flight.wait()
        shard = self.flat_parameter.shard
        if shard.grad is None:
            # A copy, because a view would keep the whole flat tensor alive.
            shard.grad = mean.to(shard.dtype, copy=True)
        else:
            shard.grad += mean
        self.flat = self.views = self.in_flight = None


def flat_parameters_of(buckets: list[ShardedBucket], parameters: list[nn.Parameter]) -> list[FlatParameter]:
    """Return the flat parameters of the buckets, which hold all parameters of ZeRO2's only param group."""
    bucketed = {id(parameter) for bucket in buckets for parameter in bucket.parameters}
    if bucketed != {id(parameter) for parameter in parameters if parameter.requires_grad}:
        raise ValueError("ZeRO2 trains the parameters of its module: add them before you wrap it")
    return [bucket.flat_parameter for bucket in reversed(buckets)]  # in the order in which forward reads them


@guards.guarded(guards.Sharded)
class ZeRO2(nn.Module):
    """ZeRO stage 2: gradients are reduce-scattered and freed while backward computes; the optimizer state is sharded.

    `.optimizer` is for schedulers and state dicts. None counts as zeros, unless no rank has used the parameter. After
    step(), whoever reads a parameter waits for its all-gather; before an older `p.data`, call finish_parameter_sync().

    Memory: with Adam in fp32, 4Ψ + 4Ψ/N + 8Ψ/N bytes for Ψ parameters on N ranks; during backward up to 3 − 1/N buckets
        more, and the gradient being computed. Inside no_sync(), full gradients of 4Ψ bytes.
    Communication: per bucket, one reduce-scatter per backward outside no_sync(), and one all-gather per step. With g
        micro-batches, (g+1)(N−1)/N · 4Ψ bytes sent per rank; with no_sync(), 2(N−1)/N · 4Ψ.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.2 and §7.
    """

    def __init__(self, module: nn.Module, optimizer_cls, bucket_cap_mb: float = 25.0, group=None, **defaults):
        super().__init__()
        self.module, self.synced = module, False
        broadcast_state(module, group)
        assigned = assign_buckets(module.parameters(), bucket_cap_mb)
        flat_parameters = [OverlappedFlatParameter(parameters, group) for parameters in assigned]
        self.buckets = [ShardedBucket(flat_parameter) for flat_parameter in flat_parameters]
        for previous, bucket in pairwise(self.buckets):
            bucket.previous = previous
        self.sync = GradientSync(self.buckets)
        flatten = partial(flat_parameters_of, self.buckets)  # deepcopy copies what a partial holds
        self.optimizer = ShardedOptimizer(module.parameters(), optimizer_cls, flatten, group, **defaults)

    _step_supports_amp_scaling = property(guards.reject_grad_scaler)

    def forward(self, *inputs, **kwargs):
        return self.module(*inputs, **kwargs)

    def no_sync(self):
        """Let full gradients accumulate on this rank, without communication."""
        return self.sync.no_sync()

    def finish_gradient_sync(self) -> None:
        """Reduce what no backward() has, as after no_sync() or without a batch; inside no_sync(), do nothing.

        Each .grad is None then, so code that reads or scales it does nothing. Use clip_grad_norm_(), scale the loss,
        or register a hook of the parameter.
        """
        self.sync.finish()
        if self.sync.enabled:
            self.synced = True

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most max_norm.

        Returns:
            The norm before scaling.
        """
        self._finish_unless_synced()
        return self.optimizer.clip_grad_norm_(max_norm)

    def step(self) -> None:
        """Update this rank's shard of the parameters and launch the all-gathers, for which readers wait."""
        self._finish_unless_synced()
        self.optimizer.step()
        self.synced = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        self.synced = False
        if self.sync.done and not self.sync.pending:  # the loop has skipped step()
            self.sync.finish()  # sends nothing, and sets done to False
        self.optimizer.zero_grad(set_to_none)

    def _finish_unless_synced(self) -> None:
        # A rank that ran no backward() since zero_grad() must take part, too: do not decide by its gradients.
        if not self.synced or self.sync.pending or self.sync.done:
            self.finish_gradient_sync()
