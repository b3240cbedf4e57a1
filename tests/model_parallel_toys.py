"""Cases that test the checks for model parallelism: blocks split by columns and rows, and layers split into stages.

The ranks import this module.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.framework import Exercise
from shared.checks.engine.model_parallel.case import Case, Collective, Shard, split_bytes
from shared.checks.engine.model_parallel.judges import (
    judge_gradients,
    judge_layout,
    judge_memory,
    judge_outputs,
    judge_traffic,
    judge_training,
    train,
)

SAMPLES = 8


class Block(nn.Module):
    """A block of an MLP, with a gain between its two layers that a split replicates."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.gain = nn.Parameter(torch.rand(()) + 0.5)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))) * self.gain)


@dataclass(frozen=True)
class Blocks(Case):
    """Blocks whose hidden elements are divided among the ranks."""

    width: int = 6
    inner: int = 12
    layers: int = 2
    is_strided: bool = False  # rank r holds the hidden elements r, r + size, r + 2 · size, …

    def build_model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Sequential(*(Block(self.width, self.inner) for _ in range(self.layers))).double()

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.randn(2, SAMPLES, self.width, generator=generator, dtype=torch.float64)
        return x, y

    def shards(self, split) -> dict[str, Shard]:
        found = {}
        for number, block in enumerate(split):
            size, rank = dist.get_world_size(block.group), dist.get_rank(block.group)
            own = range(rank, self.inner, size)
            if not self.is_strided:
                own = range(rank * self.inner // size, (rank + 1) * self.inner // size)
            shards = {
                "norm.weight": Shard(block.norm.weight),
                "norm.bias": Shard(block.norm.bias),
                "up.weight": Shard(block.up, 0, own),
                "up.bias": Shard(block.up_bias, 0, own),
                "gain": Shard(block.gain),
                "down.weight": Shard(block.down, 1, own),
                "down.bias": Shard(block.down_bias),
            }
            found |= {f"{number}.{name}": shard for name, shard in shards.items()}
        return found

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return split_bytes(module, size, lambda name: "up." in name or name.endswith("down.weight"))

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        activations, gain = Collective("all_reduce", x.nbytes), Collective("all_reduce", x.itemsize)
        return {"forward": [activations] * self.layers, "backward": [activations, gain] * self.layers}

    def larger(self) -> Case:
        return replace(self, width=60, inner=1200)


@dataclass(frozen=True)
class Copies(Blocks):
    """Two data-parallel copies of split blocks, with the ranks of a copy side by side."""

    copies: int = 2

    def split(self, piece, module: nn.Module, group):
        mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
        return piece(module, mesh)

    def train(self, split, x, y, phase):
        output, loss = super().train(split, x, y, phase)
        with phase("finish"):
            split.finish_gradient_sync()
        return output, loss

    def shards(self, split) -> dict[str, Shard]:
        return super().shards(split.module)


@dataclass(frozen=True)
class Layers(Blocks):
    """Whole blocks that are divided among the ranks, as stages of a pipeline."""

    layers: int = 4
    differentiates_inputs: bool = False

    def train(self, split, x, y, phase):
        with phase("forward and backward"):
            return None, split.step(x, y)

    def shards(self, split) -> dict[str, Shard]:
        return {name: Shard(parameter) for name, parameter in split.stage_parameters()}

    def layers_of(self, index: int, size: int) -> int:
        """Return how many layers a rank holds."""
        return (index + 1) * self.layers // size - index * self.layers // size

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return sum(p.nbytes for p in module[0].parameters()) * self.layers_of(index, size)

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        neighbors = (index > 0) + (index < size - 1)
        return {
            "forward and backward": [Collective("send", x.nbytes)] * neighbors + [Collective("broadcast", x.itemsize)]
        }


@dataclass(frozen=True)
class Columns(Case):
    """A linear layer whose outputs are divided among the ranks and are not gathered."""

    width: int = 12

    def build_model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return nn.Linear(self.width, self.width).double()

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = torch.randn(2, SAMPLES, self.width, generator=generator, dtype=torch.float64)
        return x, y

    def loss_of(self, output, y):
        return (output - y).square().sum() / self.width

    def own(self, split) -> range:
        size, rank = dist.get_world_size(split.group), dist.get_rank(split.group)
        return range(rank * self.width // size, (rank + 1) * self.width // size)

    def train(self, split, x, y, phase):
        own = self.own(split)
        output, _ = super().train(split, x, y[:, list(own)], phase)
        return Shard(output, 1, own), None  # the loss on this rank is that of its own outputs

    def shards(self, split) -> dict[str, Shard]:
        return {"weight": Shard(split.weight, 0, self.own(split)), "bias": Shard(split.bias, 0, self.own(split))}

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return split_bytes(module, size, lambda name: True)

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        return {"forward": [], "backward": [Collective("all_reduce", x.nbytes)]}

    def larger(self) -> Case:
        return replace(self, width=240)


@dataclass(frozen=True)
class PaddedColumns(Columns):
    """A linear layer with equally many rows on each rank. The last rank's rows end in padding."""

    width: int = 10

    def own(self, split) -> range:
        rows, rank = len(split.bias), dist.get_rank(split.group)
        return range(min(rank * rows, self.width), min((rank + 1) * rows, self.width))

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return -(-self.width // size) * (self.width + 1) * 8


@dataclass(frozen=True)
class Rows(Columns):
    """A linear layer whose inputs are divided among the ranks. Every rank has the whole output."""

    differentiates_inputs: bool = False

    def train(self, split, x, y, phase):
        return Case.train(self, split, x, y, phase)

    def shards(self, split) -> dict[str, Shard]:
        return {"weight": Shard(split.weight, 1, self.own(split)), "bias": Shard(split.bias)}

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return split_bytes(module, size, lambda name: name == "weight")

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        return {"forward": [Collective("all_reduce", x.nbytes)], "backward": []}


def exercise_on(piece: str, case: Case) -> Exercise:
    """Build an exercise with the checks that a chapter would have."""
    exercise = Exercise("0.1", piece)

    @exercise.check("layout")
    def every_element_has_a_rank(attempt: Attempt) -> None:
        judge_layout(*train(attempt, case))

    @exercise.check("outputs")
    def outputs_equal_one_process(attempt: Attempt) -> None:
        judge_outputs(*train(attempt, case))

    @exercise.check("gradients")
    def gradients_equal_one_process(attempt: Attempt) -> None:
        judge_gradients(*train(attempt, case))

    @exercise.check("training")
    def training_equals_one_process(attempt: Attempt) -> None:
        judge_training(*train(attempt, case))

    @exercise.check("wire")
    def each_layer_sends_once_per_direction(attempt: Attempt) -> None:
        judge_traffic(*train(attempt, case))

    @exercise.check("group", world_sizes=(3, 4))
    def groups_work_side_by_side(attempt: Attempt) -> None:
        for trained in train(attempt, case, in_groups=True):
            judge_training(trained)
            judge_traffic(trained)

    @exercise.check("memory")
    def each_rank_holds_its_shards(attempt: Attempt) -> None:
        judge_memory(attempt, case)

    return exercise


split_blocks = exercise_on("split_blocks", Blocks())
split_strided = exercise_on("split_blocks", Blocks(is_strided=True))
Stages = exercise_on("Stages", Layers())
Column, Row = exercise_on("Column", Columns()), exercise_on("Row", Rows())
PaddedColumn = exercise_on("PaddedColumn", PaddedColumns())
copies = Exercise("0.2", "Replicated")


@copies.check("training", world_sizes=(2, 4))
def copies_average_their_gradients(attempt: Attempt) -> None:
    judge_training(*train(attempt, Copies()))
