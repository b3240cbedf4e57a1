"""The registry: every way to train that the course knows, by name. The course's own, torch's and DeepSpeed's.

    model, optimizer = STRATEGIES["zero2"].build(module, Options(torch.optim.AdamW, {"lr": 1e-3}))

The training script, the dry run, the benchmarks and the tests read this list: a strategy added here appears in all of
them. One training loop serves all strategies:

- A model that communicates during backward may have no_sync(), a context for all micro-batches but the last.
- A model that communicates after backward, or has to wait for what it launched, has finish_gradient_sync().
- Everything else happens in the optimizer's step().
"""

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import deepspeed_engine

Built = tuple[nn.Module, torch.optim.Optimizer]  # the model to call, the optimizer to step


@dataclass(frozen=True)
class Options:
    """How to build a strategy.

    A strategy ignores an option that only tunes what it does not have, such as the size of its buckets. The last three
    change what is trained or by whom: only a strategy that lists one of them in `supports` accepts it.
    """

    optimizer_cls: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    defaults: Mapping[str, object] = field(default_factory=dict)  # of the optimizer: lr and the like
    bucket_cap_mb: float | None = None  # None: the strategy's own default, 25; torch's DDP then has a smaller first one
    prefetch: int = 1  # how many units to unshard ahead
    reshard_after_forward: bool = True
    compute_dtype: torch.dtype | None = None
    group: dist.ProcessGroup | None = None
    param_groups: Callable[[nn.Module], list[dict]] | None = None  # splits a module's parameters for the optimizer

    @property
    def caps(self) -> dict[str, float]:
        return {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}

    def parameters_of(self, module: nn.Module):
        return self.param_groups(module) if self.param_groups else module.parameters()

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        """Make the plain optimizer, on all parameters of a model."""
        return self.optimizer_cls(self.parameters_of(model), **self.defaults)


@dataclass(frozen=True)
class Strategy:
    """One way to train, and what a caller has to know about it."""

    name: str  # on the command line
    title: str  # in tables and figures
    provider: str  # whose it is: course, torch or deepspeed
    stage: int  # of ZeRO. 0: nothing is sharded, 1: the optimizer state, 2: gradients as well, 3: parameters as well
    wrap: Callable[[nn.Module, Options], Built]
    supports: frozenset[str] = frozenset()  # options; "accumulation" of micro-batches; "float64" all the way
    needs: str | None = None  # a module that a lab exports
    chapter: int | None = None  # of that lab
    counterpart: str | None = None  # another provider's strategy, which does the same

    def why_not(self) -> str | None:
        """Return why it cannot be built here, in one sentence; None if it can."""
        if self.provider == "deepspeed":
            return deepspeed_engine.why_not()
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"strategy {self.name} needs {self.needs}, which you build in the lab of chapter {self.chapter:02d}"
        return None

    def build(self, module: nn.Module, options: Options | None = None) -> Built:
        """Wrap a module. Call it on every rank of the group.

        Returns:
            The model to call, and the optimizer to step.

        Raises:
            RuntimeError: if the strategy cannot be built here.
            ValueError: for an option that it does not support.
        """
        if reason := self.why_not():
            raise RuntimeError(reason)
        options = options or Options()
        for name in ("compute_dtype", "group", "param_groups"):
            if getattr(options, name) is not None and name not in self.supports:
                raise ValueError(f"strategy {self.name} does not support the option {name}")
        return self.wrap(module, options)


# -- the course's own. They are imported when they are built: a student has them only once the lab is solved.


def manual_ddp(module: nn.Module, options: Options) -> Built:
    from solutions.manual_ddp import ManualDDP

    return ManualDDP(module, options.group), options.optimizer_of(module)


def bucketed_ddp(module: nn.Module, options: Options) -> Built:
    from solutions.bucketed_ddp import BucketedDDP

    return BucketedDDP(module, group=options.group, **options.caps), options.optimizer_of(module)


def overlapped_ddp(module: nn.Module, options: Options) -> Built:
    from solutions.overlapped_ddp import OverlappedDDP

    return OverlappedDDP(module, group=options.group, **options.caps), options.optimizer_of(module)


def zero1(module: nn.Module, options: Options) -> Built:
    from solutions.manual_ddp import broadcast_state
    from solutions.zero1 import ZeRO1

    broadcast_state(module, options.group)  # ZeRO1 broadcasts parameters only, and a module has buffers too
    parameters = options.parameters_of(module)
    return module, ZeRO1(parameters, options.optimizer_cls, options.group, **options.defaults)


def zero2(module: nn.Module, options: Options) -> Built:
    from solutions.zero2 import ZeRO2

    model = ZeRO2(module, options.optimizer_cls, group=options.group, **options.caps, **options.defaults)
    return model, model  # its step() is the optimizer's


def zero3(module: nn.Module, options: Options) -> Built:
    from solutions.zero3 import ZeRO3

    names = ("compute_dtype", "prefetch", "reshard_after_forward", "group")
    model = ZeRO3(module, **{name: getattr(options, name) for name in names})
    return model, options.optimizer_of(model)


# -- torch's


def ddp(module: nn.Module, options: Options) -> Built:
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, **options.caps)
    return model, options.optimizer_of(module)


def zero_redundancy(module: nn.Module, options: Options) -> Built:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import: it compiles TorchScript

    model, _ = ddp(module, options)
    settings = {"parameters_as_bucket_view": True, **options.defaults}
    return model, ZeroRedundancyOptimizer(module.parameters(), options.optimizer_cls, **settings)


def fsdp1(module: nn.Module, options: Options) -> Built:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import lambda_auto_wrap_policy

    from solutions.manual_ddp import broadcast_state
    from solutions.units import default_units

    broadcast_state(module)
    units = set(default_units(module))
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda each: each in units)
    device = next(module.parameters()).device
    model = FullyShardedDataParallel(module, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    return model, options.optimizer_of(model)


def fsdp2(module: nn.Module, options: Options) -> Built:
    from torch.distributed.fsdp import fully_shard

    from solutions.manual_ddp import broadcast_state
    from solutions.units import default_units

    broadcast_state(module)
    for unit in default_units(module):
        fully_shard(unit, reshard_after_forward=options.reshard_after_forward)
    model = fully_shard(module)
    return model, options.optimizer_of(model)


# -- DeepSpeed's


def deepspeed(module: nn.Module, options: Options, stage: int) -> Built:
    # DeepSpeed keeps what it has fetched ahead for backward, so a model of little more than this is gathered once.
    ahead = 0 if options.reshard_after_forward else 1_200_000
    settings = {"prefetch_elements": ahead, **options.caps, **options.defaults}
    return deepspeed_engine.engine(module, stage, options.optimizer_cls, **settings)


# -- the list

LIKE_DDP = frozenset({"accumulation", "float64"})
GROUP = LIKE_DDP | {"group"}
PARAM_GROUPS = GROUP | {"param_groups"}


def _course(wrap: Callable, title: str, chapter: int, stage: int, supports: frozenset, counterpart=None) -> Strategy:
    name = wrap.__name__
    return Strategy(name, title, "course", stage, wrap, supports, f"solutions.{name}", chapter, counterpart)


def _torch(wrap: Callable, title: str, stage: int, needs: str | None = None, chapter: int | None = None) -> Strategy:
    return Strategy(wrap.__name__, title, "torch", stage, wrap, LIKE_DDP, needs, chapter)


def _deepspeed(stage: int) -> Strategy:
    wrap = functools.partial(deepspeed, stage=stage)
    return Strategy(f"deepspeed{stage}", f"DeepSpeed {stage}", "deepspeed", stage, wrap)


STRATEGIES: dict[str, Strategy] = {
    each.name: each
    for each in (
        _torch(ddp, "DDP, bucket view", stage=0),
        _course(manual_ddp, "ManualDDP", 2, stage=0, supports=PARAM_GROUPS),
        _course(bucketed_ddp, "BucketedDDP", 3, stage=0, supports=PARAM_GROUPS),
        _course(overlapped_ddp, "OverlappedDDP", 4, stage=0, supports=PARAM_GROUPS, counterpart="ddp"),
        _course(zero1, "ZeRO1", 7, stage=1, supports=PARAM_GROUPS, counterpart="zero_redundancy"),
        _course(zero2, "ZeRO2", 8, stage=2, supports=GROUP, counterpart="deepspeed2"),
        _course(zero3, "ZeRO3", 10, stage=3, supports=GROUP | {"compute_dtype"}, counterpart="fsdp2"),
        _torch(zero_redundancy, "ZeroRedundancyOptimizer", stage=1),
        _torch(fsdp1, "FSDP1", stage=3, needs="solutions.units", chapter=9),
        _torch(fsdp2, "FSDP2", stage=3, needs="solutions.units", chapter=9),
        *(_deepspeed(stage) for stage in (1, 2, 3)),
    )
}


def mixed_precision(
    strategy: Strategy, optimizer_cls: Callable[..., torch.optim.Optimizer]
) -> tuple[torch.dtype, Options]:
    """Choose the dtype of a module, and the options that train it in bf16 with fp32 state.

    Memory: with Adam, 16 bytes per parameter. A strategy that supports compute_dtype holds fp32 parameters and
        gradients, and unshards in bf16 (4 + 4 + 8). With the others, parameters and gradients are bf16, and the
        optimizer holds fp32 master weights (2 + 2 + 12).
    """
    if "compute_dtype" in strategy.supports:
        return torch.float32, Options(optimizer_cls, compute_dtype=torch.bfloat16)
    from solutions.memory_wall import MasterWeights

    return torch.bfloat16, Options(functools.partial(MasterWeights, optimizer_cls=optimizer_cls))
