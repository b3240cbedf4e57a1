# Built by `make notebooks` from source/08_zero2/lab.py: edit that, not this.
"""ZeRO stage 2: each rank holds all parameters, and one N-th of the gradients and of the optimizer's state."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn

from shared.c10d import reduce_scatter_single
from solutions.overlapped_ddp import OverlappedDDP
from solutions.zero1 import FlatParameters, Messages, ZeRO1, goes_by_hand


def begin_reduce_scatter(flat: torch.Tensor, group: dist.ProcessGroup | None = None) -> Callable[[], torch.Tensor]:
    """Begin to add flat up over the group's N ranks. → a function that waits, and gives back this rank's N-th

    Shapes: flat: [N · n], used up → [n]
    Comm: a reduce_scatter, by hand on gloo; (N−1)/N of flat's bytes sent per rank.
    """
    rank, parts = dist.get_rank(group), flat.view(dist.get_world_size(group), -1)
    own = parts[rank]
    if not goes_by_hand(flat, group):
        handle, arrived = reduce_scatter_single(own, flat, group=group, async_op=True), []
    else:
        others = [peer for peer in range(len(parts)) if peer != rank]
        arrived = torch.empty_like(parts[1:])
        receives = list(zip(arrived, others, strict=True))
        handle = Messages([(parts[peer], peer) for peer in others], receives, group)

    def finish() -> torch.Tensor:
        handle.wait()
        return sum(arrived, start=own) if len(arrived) else own.clone()  # a view keeps flat alive

    return finish


class TravellingGradients:
    """The gradients of home's parameters, kept whole only until their sum is sent."""

    before = None  # what is launched before this

    def __init__(self, home: FlatParameters):
        self.home, self.parameters = home, home.parameters
        self.world_size = dist.get_world_size(home.group)
        self.flat = self.slices = self.finish = None

    def pack(self, place: int) -> None:
        """Take the gradient of parameters[place] away; None counts as zeros.

        Raises: RuntimeError for a gradient that is itself differentiable.
        """
        if self.flat is None:
            self.flat = self.home.new_flat()
            self.slices = self.home.slices_of(self.flat)
        gradient, self.parameters[place].grad = self.parameters[place].grad, None
        if gradient is None:
            return
        if gradient.requires_grad:
            raise RuntimeError("create_graph=True: messages have no graph; use the module itself")
        torch.div(gradient, self.world_size, out=self.slices[place])

    def launch(self) -> None:
        """Begin to send the sum, when that of `before` has arrived. Comm: one reduce_scatter."""
        if self.before is not None:
            self.before.wait()
        self.finish = begin_reduce_scatter(self.flat, self.home.group)

    def wait(self) -> None:
        """Add the mean to the shard's gradient, if it is under way, and let the rest go."""
        if self.finish is not None:
            shard, mean = self.home.shard, self.finish().to(self.home.shard.dtype)
            shard.grad = mean if shard.grad is None else shard.grad.add_(mean)
            self.flat = self.slices = self.finish = None


class ShardedBucket(TravellingGradients):
    """A bucket as lab 04's queue and lab 07's optimizer know it."""

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None):
        super().__init__(FlatParameters(parameters, group))

    def reset(self) -> None:
        self.home.shard.grad = None
        for parameter in self.parameters:
            parameter.grad = None  # what no_sync() has kept

    def reduce(self) -> None:
        pass

    def still_there(self) -> bool:
        return False


class BucketOptimizer(ZeRO1):
    """ZeRO1 over buckets that somebody else has laid out, and fills."""

    def __init__(self, buckets: list[ShardedBucket], params, optimizer_cls: type, group, **defaults):
        self.buckets = buckets
        super().__init__(params, optimizer_cls, group, **defaults)

    def _lay_out(self, parameters: list[nn.Parameter]) -> list[ShardedBucket]:
        return self.buckets


class SyncsOnce(OverlappedDDP):
    """Overlap over sharded buckets, of which one at a time is launched; knows whether a step may begin."""

    bucket_type = ShardedBucket

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0, group=None):
        super().__init__(module, bucket_cap_mb, group)
        self.synced = False  # since the last gradient, the last zero_grad() and the last step()
        for before, bucket in pairwise(self.buckets):
            bucket.before = before

    def finish_gradient_sync(self) -> None:
        """Wait until this rank has its part of every mean gradient."""
        super().finish_gradient_sync()
        self.synced = self.syncs

    def finish_once(self) -> None:
        """Synchronise, unless that is done."""
        if not self.synced:
            self.finish_gradient_sync()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self.synced = False
        super()._on_gradient(parameter)


class ZeRO2(SyncsOnce):
    """ZeRO stage 2: gradients are reduce-scattered while backward computes, and freed; the optimizer is sharded.

    `.optimizer` is the sharded optimizer, for schedulers and its state_dict().

    Memory: with Adam in fp32, 4Ψ + 4Ψ/N + 8Ψ/N bytes for Ψ parameters on N ranks; in backward up to 3 + 2/N
    buckets more and the gradient that comes; no_sync() keeps whole gradients, 4Ψ.
    Comm: per backward outside no_sync(), one reduce_scatter per bucket; per step, one all_gather per bucket. With g
    micro-batches (g+1)(N−1)/N · 4Ψ bytes, with no_sync() 2(N−1)/N · 4Ψ.
    Source: Rajbhandari et al. 2020, "ZeRO", §5.2 and §7.
    """

    def __init__(self, module: nn.Module, optimizer_cls, bucket_cap_mb: float = 25.0, group=None, **defaults):
        super().__init__(module, bucket_cap_mb, group)
        parameters = module.parameters()
        self.optimizer = BucketOptimizer(self.buckets, parameters, optimizer_cls, group, **defaults)

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale gradients so that their norm over all parameters is at most max_norm. → the norm before"""
        self.finish_once()
        return self.optimizer.clip_grad_norm_(max_norm)

    def step(self) -> None:
        """Update this rank's part of the parameters, and collect the others'."""
        self.finish_once()
        self.optimizer.step()
        self.synced = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        self.synced = False
        self.optimizer.zero_grad()
