"""How the course's own strategies wrap a model, and what trains with them.

Each module of a chapter is imported only when it is used, because it does not exist before its lab is solved.
"""

import torch
import torch.distributed as dist
from torch import nn

from shared import guards
from shared.data import tasks
from shared.models import GPTConfig, with_experts
from shared.sharded.layers import expect_plain_moe, expect_same
from shared.sharded.parts import mark
from solutions.strategy import Built, Options


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
