# Built by `make notebooks` from source/18_3d_parallelism/lab.py: edit that, not this.
"""3D parallelism: a GPT on a mesh of dp × pp × tp ranks.

    dp   data parallelism: each replica of the model trains on its part of the batch (chapters 04 and 07)
    pp   pipeline parallelism: each stage has some of the layers (chapter 15)
    tp   tensor parallelism: each rank has a shard of every matrix of its stage (chapter 13)

The ranks that differ only in one coordinate form a process group along that axis.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared.models import TinyGPT, gpt_layers
from shared.sharded.layers import expect_equally_ignored
from solutions.flat import FlatParameter
from solutions.overlapped_ddp import OverlappedDDP
from solutions.pipeline import Pipeline
from solutions.tensor_parallel import parallelize, sharded_names
from solutions.vocabulary import vocab_parallel_cross_entropy
from solutions.zero1 import ZeRO1


def make_mesh(dp: int, pp: int, tp: int) -> DeviceMesh:
    """Arrange all ranks in a mesh with the axes "dp", "pp" and "tp". Neighboring ranks differ along tp.

    Communication: forms one process group per axis.
    Raises:
        ValueError: if dp · pp · tp is not the number of ranks.
    """
    world_size = dist.get_world_size()
    if dp * pp * tp != world_size:
        raise ValueError(
            f"a mesh of dp={dp} × pp={pp} × tp={tp} needs {dp * pp * tp} ranks, but there are {world_size}"
        )
    device_type = "cuda" if torch.cuda.is_initialized() else "cpu"
    return init_device_mesh(device_type, (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))


def token_loss(logits: Tensor, targets: Tensor, *, vocab_size: int, group: ProcessGroup) -> Tensor:
    """Return the mean cross-entropy of logits that are split over the ranks of a group, without those of padding.

    Shape: logits (B, T, V / tp), padded; targets (B, T); returns a scalar.
    Communication: two all-reduces, of one and two numbers per target.
    """
    columns = logits.shape[-1]
    used = max(0, vocab_size - dist.get_rank(group) * columns)
    is_padding = torch.arange(columns, device=logits.device) >= used
    return vocab_parallel_cross_entropy(logits.masked_fill(is_padding, -torch.inf), targets, group)


def split_model(model: TinyGPT, mesh: DeviceMesh, schedule: str = "1f1b", micro_batches: int = 8) -> Pipeline:
    """Split each layer of a GPT over tp, and distribute the layers over pp. The model must be the same on every rank.

    Memory: about 1 / (pp · tp) of the parameters, once nothing else refers to the model.
    Communication: that of chapter 13 along tp, and that of chapter 15 along pp.
    Raises:
        ValueError: if tp does not divide the heads, if there are fewer layers than stages, or if the schedule cannot
            work.
    """
    tp_group, pp_group = mesh.get_group("tp"), mesh.get_group("pp")
    parallelize(model, tp_group)
    loss_fn = partial(token_loss, vocab_size=model.config.vocab_size, group=tp_group)
    return Pipeline(gpt_layers(model), schedule, micro_batches, loss_fn, pp_group)


class Parallel3D(nn.Module):
    """Trains a GPT on a mesh: each layer is split over tp, the layers over pp, and the batch over dp.

    Args:
        model: The whole model, the same on every rank. It is split in place.
        mesh: A mesh with the axes "dp", "pp" and "tp", of all ranks.
        optimizer_cls: The class of the optimizer that updates the stage's parameters.
        schedule: The schedule of the pipeline.
        micro_batches: The number of micro-batches of each replica.
        zero_stage: 0 keeps the optimizer state on each replica, 1 shards it over dp. Others raise a ValueError.
        defaults: Keyword arguments of the optimizer.

    Memory: about 1 / (pp · tp) of the model state. ZeRO-1 also divides the optimizer state by dp.
    Communication: per step, that of chapters 13 and 15 along tp and pp. Along dp, one all-reduce per bucket of the
        stage's gradients, or with ZeRO-1 one reduce-scatter and one all-gather; and one all-reduce of the loss.
    Source: Narayanan et al. 2021, "Megatron-LM", §3; Smith et al. 2022, "Megatron-Turing NLG 530B", §3.
    """

    def __init__(
        self,
        model: TinyGPT,
        mesh: DeviceMesh,
        optimizer_cls: Callable[..., torch.optim.Optimizer],
        *,
        schedule: str = "1f1b",
        micro_batches: int = 8,
        zero_stage: int = 0,
        **defaults,
    ):
        super().__init__()
        if zero_stage not in (0, 1):
            raise ValueError(f"zero_stage must be 0 or 1, got {zero_stage}")
        self.dp_group, self.zero_stage = mesh.get_group("dp"), zero_stage
        self.replicas, self.tp_size = mesh["dp"].size(), mesh["tp"].size()
        self.pipeline = split_model(model, mesh, schedule, micro_batches)
        self.stage = nn.ModuleList(self.pipeline.chunks)
        names = sharded_names(self.stage)
        self.sharded = {p for name, p in self.stage.named_parameters() if name in names}
        self.add_data_parallelism(optimizer_cls, defaults)

    def add_data_parallelism(self, optimizer_cls: Callable, defaults: dict) -> None:
        """Build the optimizer, and what averages gradients over dp."""
        parameters = self.stage.parameters()
        if self.zero_stage == 0:
            self.replica = OverlappedDDP(self.stage, group=self.dp_group)
            self.optimizer = optimizer_cls(parameters, **defaults)
        else:
            self.optimizer = ZeRO1(parameters, optimizer_cls, self.dp_group, **defaults)

    def stage_parameters(self) -> dict[str, nn.Parameter]:
        """Return this rank's parameters, by their names in the whole model."""
        return self.pipeline.stage_parameters()

    def own_part(self, batch: Tensor) -> Tensor:
        """Return this replica's part of a global batch.

        Shape: batch (B, …); returns (B / dp, …).
        Raises:
            ValueError: if the batch cannot be divided evenly.
        """
        if len(batch) % self.replicas:
            raise ValueError(f"a batch of {len(batch)} samples cannot be split over {self.replicas} replicas")
        return batch.chunk(self.replicas)[dist.get_rank(self.dp_group)]

    def step(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of a global batch to those of the stage's parameters.

        Args:
            inputs: The tokens of the global batch, on every rank.
            targets: Their targets.

        Returns:
            The mean loss of the global batch, in float64, the same on every rank.

        Shape: inputs and targets (B, T).
        """
        expect_equally_ignored(targets, self.replicas * self.pipeline.micro_batches)
        own = self.own_part(inputs), self.own_part(targets)
        if self.zero_stage == 0:
            with self.replica.no_sync():
                loss = self.pipeline.step(*own)
            self.replica.finish_gradient_sync()
        else:
            loss = self.pipeline.step(*own)  # the optimizer averages the gradients
        dist.all_reduce(loss, group=self.dp_group)
        return loss / self.replicas

    def gradients(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return this rank's averaged gradients, each with its parameter. With ZeRO-1, those of its shard."""
        if self.zero_stage == 0:
            parameters = self.stage.parameters()
            return [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        self.optimizer.reduce_gradients()
        return [pair for flat in self.optimizer.flat_parameters for pair in pieces_of(flat)]

    def copies_of(self, parameter: nn.Parameter) -> int:
        """Return how many ranks of the mesh count the same gradient of a parameter."""
        stages = dict(self.pipeline.tied).get(parameter, [self.pipeline.stage])
        along_tp = 1 if parameter in self.sharded else self.tp_size
        along_dp = self.replicas if self.zero_stage == 0 else 1
        return len(stages) * along_tp * along_dp

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that the norm of the whole model's gradient is at most max_norm.

        Returns:
            The norm before scaling, the same on every rank.

        Communication: one all-reduce of one element, over the mesh; with ZeRO-1, first a reduce-scatter along dp, which
            the optimizer's step() does not repeat.
        """
        gradients = self.gradients()
        total = torch.zeros((), dtype=torch.float64, device=self.pipeline.device)
        for parameter, gradient in gradients:
            total += gradient.double().square().sum() / self.copies_of(parameter)
        dist.all_reduce(total)
        norm = total.sqrt()
        for _, gradient in gradients:
            gradient *= (max_norm / (norm + 1e-6)).clamp(max=1)
        return norm


def pieces_of(flat_parameter: FlatParameter) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter that has elements in this rank's shard of a flat parameter, with the gradient of these.

    Shape: each gradient [k], a view of shard.grad.
    """
    layout, gradient = flat_parameter.layout, flat_parameter.shard.grad
    begin = -dist.get_rank(layout.group) * len(gradient)
    for parameter in layout.parameters:
        end = begin + parameter.numel()
        piece = gradient[max(begin, 0) : max(end, 0)]
        if piece.numel():
            yield parameter, piece
        begin = end
