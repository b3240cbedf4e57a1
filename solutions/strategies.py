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
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shared import deepspeed_engine, guards
from shared.data import tasks
from shared.models import GPTConfig, with_experts
from shared.sharded.layers import expect_plain_moe, expect_same
from shared.sharded.parts import mark

Built = tuple[nn.Module, torch.optim.Optimizer]  # the model to call and the optimizer to step


@dataclass(frozen=True)
class Options:
    """How to build a strategy.

    A strategy without buckets, units, prefetching, a schedule or a mesh ignores the options that tune them. Four
    options, compute_dtype, group, param_groups and compressor, change the result of the training or the ranks that take
    part. So a strategy accepts one of them only if `supports` lists it.
    """

    optimizer_cls: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    defaults: Mapping[str, object] = field(default_factory=dict)  # keyword arguments of the optimizer, such as lr
    bucket_cap_mb: float | None = None  # None: the strategy's default, 25, with which DDP's first bucket is smaller
    overlap_parameters: bool = False  # whether ZeRO1 gets its module, so that its collectives overlap
    prefetch: int = 1  # how many units to unshard ahead of time
    reshard_after_forward: bool = True
    min_unit_elements: int = 0  # units with fewer parameters belong to the root, which is unsharded all at once
    compute_dtype: torch.dtype | None = None
    group: dist.ProcessGroup | None = None
    param_groups: Callable[[nn.Module], list[dict]] | None = None  # builds the optimizer's parameter groups
    schedule: str = "1f1b"  # of a pipeline
    micro_batches: int = 8  # of a pipeline's batch
    dp: int = 1  # replicas on a mesh
    pp: int = 0  # stages of a pipeline on a mesh; 0: as many as dp and tp leave ranks for
    tp: int = 1  # ranks that share each layer on a mesh
    cp: int = 0  # ranks that share each sequence; 0: as many as dp leaves ranks for
    zero_stage: int = 0  # over the replicas of a mesh: 0 or 1
    compressor: object | None = None  # of the gradients, such as chapter 19's Int8()

    @property
    def bucket_options(self) -> dict[str, float]:
        """Return the keyword arguments for a wrapper with buckets."""
        return {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}

    def units(self, module: nn.Module) -> list[nn.Module]:
        """Return the submodules that are unsharded one at a time: the default units that are large enough."""
        from solutions.units import default_units

        sizes = {unit: sum(parameter.numel() for parameter in unit.parameters()) for unit in default_units(module)}
        return [unit for unit, size in sizes.items() if size >= self.min_unit_elements]

    def optimizer_params(self, module: nn.Module):
        """Return what the optimizer takes as its first argument: parameters or parameter groups."""
        return self.param_groups(module) if self.param_groups else module.parameters()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build an ordinary optimizer for all parameters of a model."""
        return self.optimizer_cls(self.optimizer_params(model), **self.defaults)


@dataclass(frozen=True)
class Strategy:
    """One way to train, and what a caller has to know about it."""

    name: str  # on the command line
    title: str  # in tables and figures
    provider: str  # course, torch or deepspeed
    stage: int  # ZeRO stage. 0: nothing is sharded, 1: the optimizer state, 2: gradients too, 3: parameters too
    wrap: Callable[[nn.Module, Options], Built]
    # Names of options; "accumulation" of micro-batches; "float64" throughout; a "mesh".
    supports: frozenset[str] = frozenset()
    needs: str | None = None  # a module that a lab exports
    chapter: int | None = None  # the chapter of that lab
    counterpart: str | None = None  # the strategy of another provider that does the same
    splits_layers: bool = False  # a GPT's layers: all ranks get the same batch, and model(x, y) returns the loss
    is_pipelined: bool = False  # then splits_layers, too, and model.step(x, y) also runs backward
    shards_experts: bool = False  # a model without experts trains as with ManualDDP

    def why_not(self) -> str | None:
        """Return a sentence that says why the strategy cannot be built here, or None if it can."""
        if self.provider == "deepspeed":
            return deepspeed_engine.why_not()
        if self.needs and importlib.util.find_spec(self.needs) is None:
            module = f"{self.needs}, the finished module of lab {self.chapter:02d}"
            return f"strategy {self.name} needs {module}, which you get with the chapter after it"
        return None

    def build(self, module: nn.Module, options: Options | None = None) -> Built:
        """Wrap a module. To be called on every rank of the group.

        Returns:
            The model to call and the optimizer to step.

        Raises:
            RuntimeError: If the strategy cannot be built here.
            ValueError: If the strategy does not support one of the options.
        """
        if reason := self.why_not():
            raise RuntimeError(reason)
        options = options or Options()
        for name in ("compute_dtype", "group", "param_groups", "compressor"):
            if getattr(options, name) is not None and name not in self.supports:
                raise ValueError(f"strategy {self.name} does not support the option {name}")
        return self.wrap(module, options)


# -- the course's own. Each is imported only when it is built, because it does not exist before its lab is solved.


def manual_ddp(module: nn.Module, options: Options) -> Built:
    from solutions.manual_ddp import ManualDDP

    return ManualDDP(module, options.group), options.build_optimizer(module)


def bucketed_ddp(module: nn.Module, options: Options) -> Built:
    from solutions.bucketed_ddp import BucketedDDP

    return BucketedDDP(module, group=options.group, **options.bucket_options), options.build_optimizer(module)


def overlapped_ddp(module: nn.Module, options: Options) -> Built:
    from solutions.overlapped_ddp import OverlappedDDP

    further = {} if options.compressor is None else {"compressor": options.compressor}
    model = OverlappedDDP(module, group=options.group, **options.bucket_options, **further)
    return model, options.build_optimizer(module)


def build_compressor(name: str):
    """Build a compressor of chapter 19 by its name on the command line, or return None for "none"."""
    if name == "none":
        return None
    from solutions.compression import Int8, PowerSGD, TopK

    return {"int8": Int8, "topk": lambda: TopK(ratio=0.05), "powersgd": lambda: PowerSGD(rank=4)}[name]()


def zero1(module: nn.Module, options: Options) -> Built:
    from solutions.manual_ddp import broadcast_state
    from solutions.zero1 import ZeRO1

    broadcast_state(module, options.group)  # ZeRO1 itself broadcasts parameters only, not buffers
    parameters, owner = options.optimizer_params(module), module if options.overlap_parameters else None
    return module, ZeRO1(parameters, options.optimizer_cls, options.group, owner, **options.defaults)


def zero2(module: nn.Module, options: Options) -> Built:
    from solutions.zero2 import ZeRO2

    model = ZeRO2(module, options.optimizer_cls, group=options.group, **options.bucket_options, **options.defaults)
    return model, model  # ZeRO2 is also the optimizer: it has step()


def zero3(module: nn.Module, options: Options) -> Built:
    from solutions.zero3 import ZeRO3

    names = ("compute_dtype", "prefetch", "reshard_after_forward", "group")
    model = ZeRO3(module, options.units(module), **{name: getattr(options, name) for name in names})
    return model, options.build_optimizer(model)


def tensor_parallel(module: nn.Module, options: Options, sequence_parallel: bool = False) -> Built:
    from shared.dryrun.decoder import Decoder
    from solutions.manual_ddp import broadcast_state
    from solutions.parallel_decoder import parallelize_decoder
    from solutions.tensor_parallel import parallelize

    broadcast_state(module, options.group)
    split = parallelize_decoder if isinstance(module, Decoder) else parallelize
    model = split(module, options.group, sequence_parallel)
    return model, options.build_optimizer(model)


class Replicas(nn.Module):
    """A model on each replica. finish_gradient_sync() averages the gradients that the model itself has synchronized."""

    def __init__(self, model: nn.Module, group: dist.ProcessGroup):
        super().__init__()
        self.model, self.group = model, group

    def forward(self, *args):
        return self.model(*args)

    def finish_gradient_sync(self) -> None:
        self.model.finish_gradient_sync()
        gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        mean = torch.nn.utils.parameters_to_vector(gradients) / dist.get_world_size(self.group)
        dist.all_reduce(mean, group=self.group)
        torch.nn.utils.vector_to_parameters(mean, gradients)


def context_parallel(module: nn.Module, options: Options) -> Built:
    from torch.distributed.device_mesh import init_device_mesh

    from solutions.context_parallel import ContextParallelGPT
    from solutions.manual_ddp import broadcast_state

    broadcast_state(module)
    if options.dp == 1:
        model = ContextParallelGPT(module)
    else:
        sizes = options.dp, dist.get_world_size() // options.dp
        mesh = init_device_mesh(next(module.parameters()).device.type, sizes, mesh_dim_names=("dp", "cp"))
        model = Replicas(ContextParallelGPT(module, mesh.get_group("cp")), mesh.get_group("dp"))
    return model, options.build_optimizer(module)


class PipelinedModel(nn.Module):
    """The layers of one stage. step(inputs, targets) adds up the gradients of a batch, and returns its mean loss."""

    def __init__(self, pipeline):
        super().__init__()
        self.chunks, self.pipeline = nn.ModuleList(pipeline.chunks), pipeline
        self.step = pipeline.step


def pipeline_parallel(module: nn.Module, options: Options) -> Built:
    from shared.dryrun.decoder import Decoder, decoder_layers
    from shared.models import gpt_layers
    from solutions.manual_ddp import broadcast_state
    from solutions.pipeline import Pipeline

    broadcast_state(module, options.group)
    layers = decoder_layers(module) if isinstance(module, Decoder) else gpt_layers(module)
    model = PipelinedModel(Pipeline(layers, options.schedule, options.micro_batches, loss_of_tokens, options.group))
    return model, options.build_optimizer(model)


def three_d(module: nn.Module, options: Options) -> Built:
    from solutions.manual_ddp import broadcast_state
    from solutions.parallel_3d import Parallel3D, make_mesh

    stages = options.pp or dist.get_world_size() // (options.dp * options.tp)
    mesh = make_mesh(options.dp, stages, options.tp)
    broadcast_state(module)
    how = {name: getattr(options, name) for name in ("schedule", "micro_batches", "zero_stage")}
    model = Parallel3D(module, mesh, options.optimizer_cls, **how, **options.defaults)
    return model, model.optimizer


@guards.guarded(guards.Joint)
class ExpertParallelModel(nn.Module):
    """A model whose experts are sharded over the ranks. Everything else is replicated, as in ManualDDP.

    The module must be the same on every rank, and all ranks call forward and backward equally often, also to evaluate.
    If no rank has used a parameter, its gradient stays None. An expert's gradient is divided by N, so a penalty on its
    parameters, which only one rank adds to its loss, would count 1/N times: use the optimizer's weight_decay. With a
    capacity_factor, each rank drops tokens of its own batch. The optimizer state of experts belongs to their rank.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None):
        from solutions.expert_parallel import ExpertParallelMoE, MoE

        super().__init__()
        expect_same(module.named_parameters(), group)
        for path, layer in expect_plain_moe(module, MoE).items():
            parent, _, name = path.rpartition(".")
            divided = ExpertParallelMoE.from_moe(layer, group).train(layer.training)
            setattr(module.get_submodule(parent), name, divided)
            mark(layer.parameters(), instead_of_step="build it after wrapping, with this model's parameters()")
        layers = [layer for layer in module.modules() if isinstance(layer, ExpertParallelMoE)]
        self.module, self.group = module, group
        self.of_experts = [parameter for layer in layers for parameter in layer.experts.parameters()]

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_sync(self) -> None:
        """Turn the gradients into those of the mean of the ranks' losses."""
        from solutions.expert_parallel import average_gradients

        sharded = set(self.of_experts)
        others = [each for each in self.parameters() if each.requires_grad and each not in sharded]
        for parameter in others:
            if parameter.grad is None:  # perhaps only on this rank
                parameter.grad = torch.full_like(parameter, guards.UNUSED)
        average_gradients(self.of_experts, others, self.group)


def expert_parallel(module: nn.Module, options: Options) -> Built:
    from solutions.manual_ddp import broadcast_state

    broadcast_state(module, options.group)
    model = ExpertParallelModel(module, options.group)
    return model, options.build_optimizer(model)


def moe(seed: int, dtype: torch.dtype, config: GPTConfig | None = None) -> tasks.Task:
    """Predict the next character with a GPT whose MLPs are mixtures of experts.

    There is no balancing loss: it is computed from a rank's own samples, and the mean of the ranks' balancing losses
    is not that of the whole batch. So the losses would depend on the number of ranks.
    """
    from solutions.expert_parallel import MoE  # does not exist before its lab is solved

    task = tasks.gpt(seed, dtype, config)
    with_experts(task.module, lambda width: MoE(width, 2 * width, experts=8, top_k=2), seed).to(dtype)
    return task


def loss_of_tokens(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy over all tokens."""
    return nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


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
