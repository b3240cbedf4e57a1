"""The registry of training strategies, by name: the course's own, torch's and DeepSpeed's.

    model, optimizer = STRATEGIES["zero2"].build(module, Options(torch.optim.AdamW, {"lr": 1e-3}))

The training script, the dry run and the tests find the strategies here. A benchmark compares only those that it names,
most of them in `benchmarks/rungs.py`. One training loop serves all strategies:

- A model that communicates during backward may have no_sync(), a context manager for all micro-batches but the last.
- A model that communicates after backward, or has to wait for collectives in flight, has finish_gradient_sync().
- A model whose layers are split takes the targets, too, and returns the loss. Its ranks all get the same batch.
- A pipelined model has step(), which takes inputs and targets of a batch, and runs forward and backward itself.
- Everything else happens in the optimizer's step().
"""

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import deepspeed_engine
from solutions.course_strategies import (
    bucketed_ddp,
    context_parallel,
    expert_parallel,
    manual_ddp,
    overlapped_ddp,
    pipeline_parallel,
    tensor_parallel,
    three_d,
    zero1,
    zero2,
    zero3,
)
from solutions.strategy import Built, Options, Strategy

# -- torch's


def ddp(module: nn.Module, options: Options) -> Built:
    model = DistributedDataParallel(module, gradient_as_bucket_view=True, **options.bucket_options)
    return model, options.build_optimizer(module)


def zero_redundancy(module: nn.Module, options: Options) -> Built:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # slow to import, because it compiles TorchScript

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
    policy = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda submodule: submodule in units)
    device = next(module.parameters()).device
    model = FullyShardedDataParallel(module, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    return model, options.build_optimizer(model)


def fsdp2(module: nn.Module, options: Options) -> Built:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from solutions.manual_ddp import broadcast_state

    broadcast_state(module)
    device = next(module.parameters()).device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))  # by default, torch would take any GPU it finds
    for unit in options.units(module):
        fully_shard(unit, mesh=mesh, reshard_after_forward=options.reshard_after_forward)
    model = fully_shard(module, mesh=mesh)
    return model, options.build_optimizer(model)


# -- DeepSpeed's


def deepspeed(module: nn.Module, options: Options, stage: int) -> Built:
    # DeepSpeed keeps what it has prefetched for backward, so a model not much larger than this is unsharded only once.
    prefetch_elements = 0 if options.reshard_after_forward else 1_200_000
    settings = {"prefetch_elements": prefetch_elements, **options.bucket_options, **options.defaults}
    return deepspeed_engine.engine(module, stage, options.optimizer_cls, **settings)


# -- the registry

TRAINING_LOOP = frozenset({"accumulation", "float64"})
WITH_GROUP = TRAINING_LOOP | {"group"}
WITH_PARAM_GROUPS = WITH_GROUP | {"param_groups"}
WITH_COMPRESSOR = WITH_PARAM_GROUPS | {"compressor"}


def _course(wrap: Callable, title: str, chapter: int, stage: int, supports: frozenset, counterpart=None) -> Strategy:
    name = wrap.__name__
    return Strategy(name, title, "course", stage, wrap, supports, f"solutions.{name}", chapter, counterpart)


def _torch(wrap: Callable, title: str, stage: int, needs: str | None = None, chapter: int | None = None) -> Strategy:
    return Strategy(wrap.__name__, title, "torch", stage, wrap, TRAINING_LOOP, needs, chapter)


def _tensor_parallel(name: str, title: str, sequence_parallel: bool) -> Strategy:
    wrap = functools.partial(tensor_parallel, sequence_parallel=sequence_parallel)
    needs = "solutions.tensor_parallel"
    return Strategy(name, title, "course", 0, wrap, WITH_PARAM_GROUPS, needs, chapter=13, splits_layers=True)


def _context_parallel() -> Strategy:
    needs, supports = "solutions.context_parallel", frozenset({"accumulation", "float64", "mesh"})
    title = "context parallelism"
    return Strategy("cp", title, "course", 0, context_parallel, supports, needs, chapter=14, splits_layers=True)


def _pipeline_parallel() -> Strategy:
    needs, options = "solutions.pipeline", {"chapter": 15, "splits_layers": True, "is_pipelined": True}
    return Strategy(
        "pp", "pipeline parallelism", "course", 0, pipeline_parallel, frozenset({"float64", "group"}), needs, **options
    )


def _expert_parallel() -> Strategy:
    needs, options = "solutions.expert_parallel", {"chapter": 16, "shards_experts": True}
    return Strategy("ep", "expert parallelism", "course", 0, expert_parallel, WITH_PARAM_GROUPS, needs, **options)


def _three_d() -> Strategy:
    needs, options = "solutions.parallel_3d", {"chapter": 18, "splits_layers": True, "is_pipelined": True}
    return Strategy("3d", "3D parallelism", "course", 0, three_d, frozenset({"float64", "mesh"}), needs, **options)


def _deepspeed(stage: int) -> Strategy:
    wrap = functools.partial(deepspeed, stage=stage)
    return Strategy(f"deepspeed{stage}", f"DeepSpeed {stage}", "deepspeed", stage, wrap)


STRATEGIES: dict[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        _torch(ddp, "DDP, bucket view", stage=0),
        _course(manual_ddp, "ManualDDP", 2, stage=0, supports=WITH_PARAM_GROUPS),
        _course(bucketed_ddp, "BucketedDDP", 3, stage=0, supports=WITH_PARAM_GROUPS),
        _course(overlapped_ddp, "OverlappedDDP", 4, stage=0, supports=WITH_COMPRESSOR, counterpart="ddp"),
        _course(zero1, "ZeRO1", 7, stage=1, supports=WITH_PARAM_GROUPS, counterpart="zero_redundancy"),
        _course(zero2, "ZeRO2", 8, stage=2, supports=WITH_GROUP, counterpart="deepspeed2"),
        _course(zero3, "ZeRO3", 10, stage=3, supports=WITH_GROUP | {"compute_dtype"}, counterpart="fsdp2"),
        _torch(zero_redundancy, "ZeroRedundancyOptimizer", stage=1),
        _torch(fsdp1, "FSDP1", stage=3, needs="solutions.units", chapter=9),
        _torch(fsdp2, "FSDP2", stage=3, needs="solutions.units", chapter=9),
        *(_deepspeed(stage) for stage in (1, 2, 3)),
        _tensor_parallel("tp", "tensor parallelism", sequence_parallel=False),
        _tensor_parallel("tp+sp", "tensor and sequence parallelism", sequence_parallel=True),
        _context_parallel(),
        _pipeline_parallel(),
        _expert_parallel(),
        _three_d(),
    )
}


def mixed_precision(
    strategy: Strategy, optimizer_cls: Callable[..., torch.optim.Optimizer]
) -> tuple[torch.dtype, Options]:
    """Choose the dtype of a module and the options that train it in bf16 with fp32 state.

    Returns:
        The dtype to build the module in, and the options for the strategy.

    Memory: with Adam, 16 bytes per parameter. A strategy that supports compute_dtype holds fp32 parameters and
        gradients, and unshards in bf16 (4 + 4 + 8). With the other strategies, parameters and gradients are bf16, and
        the optimizer holds fp32 master weights (2 + 2 + 12).
    """
    if "compute_dtype" in strategy.supports:
        return torch.float32, Options(optimizer_cls, compute_dtype=torch.bfloat16)
    from solutions.memory_wall import MasterWeights

    return torch.bfloat16, Options(functools.partial(MasterWeights, optimizer_cls=optimizer_cls))
