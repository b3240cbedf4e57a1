"""The models that the checks of chapter 15 train in a pipeline, and what each stage must hold and send.

The ranks import this module.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.checks.engine.candidate import device_here
from shared.checks.engine.model_parallel.case import Case, Collective, Shard
from shared.models import GPTConfig, TinyGPT, gpt_layers
from shared.schedules import Action

WIDTH, TOKENS, VOCABULARY = 6, 4, 11
WEIGHTS_LAST = "postponed weights"  # a schedule that no pipeline knows by name, so it is given as actions


def parts_of(count: int, parts: int) -> list[range]:
    """Return the layers of each chunk, as shared.sharded.ownership.split_evenly() does."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(first, end) for first, end in pairwise(bounds)]


def weights_last(stages: int, micro_batches: int) -> list[list[Action]]:
    """Schedule all forwards, all backwards, and then all weight gradients."""
    actions = [Action(kind, index) for kind in "FBW" for index in range(micro_batches)]
    return [actions for _ in range(stages)]


def seeded(seed: int, build, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().to(dtype)


@dataclass(frozen=True)
class Stack(Case):
    """A stack of linear layers with tanh between them, trained in a pipeline.

    Attributes:
        schedule: The name of a schedule, or WEIGHTS_LAST.
        micro_batches: How many parts a batch has.
        samples: How many samples a micro-batch has.
        layers: How many layers the stack has.
        tied: Whether the first and the last linear layer share their weight.
        all_tied: Whether all linear layers do.
        woven: Whether every second linear layer shares one weight, and the others another.
        frozen: Whether the first bias is frozen, so that it has no gradient.
        chunks: How many chunks each stage has, if the schedule is interleaved.
        narrows: Whether each linear layer is narrower than the one before, so that no two messages are alike.
        warm: Whether a step is run first, so that every stage knows the shapes of what arrives.
    """

    schedule: str = "gpipe"
    micro_batches: int = 4
    samples: int = 2
    layers: int = 9
    tied: bool = False
    all_tied: bool = False
    woven: bool = False
    frozen: bool = False
    chunks: int = 2
    width: int = WIDTH
    narrows: bool = False
    warm: bool = False
    differentiates_inputs: bool = False

    def __str__(self) -> str:
        ties = ", all of which share one weight" if self.all_tied else ", which alternate between two weights"
        shown = ties if self.all_tied or self.woven else ""
        return f"{self.schedule}, {self.micro_batches} micro-batches, {self.layers} layers{shown}"

    @property
    def has_usual_batches(self) -> bool:
        return self.warm

    def positions(self, stages: int) -> int:
        return stages * (self.chunks if self.schedule == "interleaved" else 1)

    def build_model(self, seed: int) -> nn.Module:
        return seeded(seed, self._build, torch.float64)

    def _build(self) -> nn.Module:
        layers: list[Any] = [
            nn.Tanh() if index % 2 else nn.Linear(self.width_of(index // 2), self.width_of(index // 2 + 1))
            for index in range(self.layers)
        ]
        if self.tied:
            layers[2 * ((self.layers - 1) // 2)].weight = layers[0].weight
        if self.all_tied:
            for layer in layers[::2]:
                layer.weight = layers[0].weight
        if self.woven:
            for index, layer in enumerate(layers[::2]):
                layer.weight = layers[2 * (index % 2)].weight
        layers[0].bias.requires_grad_(not self.frozen)
        return nn.Sequential(*layers)

    def width_of(self, linear: int) -> int:
        """Return the number of inputs of a linear layer, or after the last one, the number of outputs."""
        return self.width + (self.layers - linear if self.narrows else 0)

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        widths = self.width_of(0), self.width_of((self.layers + 1) // 2)
        shapes = [(self.micro_batches * self.samples, 3, width) for width in widths]
        x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return x, y

    def split(self, piece, module: nn.Module, group):
        chunks = {"chunks": self.chunks} if self.schedule == "interleaved" else {}
        schedule = self.schedule
        if schedule == WEIGHTS_LAST:
            schedule = weights_last(dist.get_world_size(group), self.micro_batches)
        pipeline = piece(module, schedule, self.micro_batches, self.loss_of, group, **chunks)
        if self.warm:
            pipeline.step(*(each.to(device_here()) for each in self.draw_batch(torch.Generator())))
        return pipeline

    def train(self, split, x, y, phase):
        with phase("step"):
            loss = split.step(x, y)
        return None, loss

    def shards(self, split) -> dict[str, Shard]:
        return {name: Shard(parameter) for name, parameter in split.stage_parameters().items()}

    def own_parameters(self, module, index: int, size: int) -> set[nn.Parameter]:
        """Return the parameters of a stage."""
        layers = list(module)
        own = parts_of(len(layers), self.positions(size))[index::size]
        return {p for part in own for number in part for p in layers[number].parameters()}

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        return sum(p.nbytes for p in self.own_parameters(module, index, size))

    def output_bytes(self, module: nn.Module, x: torch.Tensor) -> int:
        """Return the bytes of an activation between two chunks, for one micro-batch."""
        return len(x) // self.micro_batches * x[0].numel() * x.itemsize

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        if size == 1:
            return {"step": [Collective("broadcast", 8)]}
        positions, nbytes = self.positions(size), self.output_bytes(module, x)
        own = range(index, positions, size)
        sends = sum(position < positions - 1 for position in own) + sum(position > 0 for position in own)
        sent = [Collective("send", nbytes)] * (self.micro_batches * sends)
        return {"step": [*sent, *self._tied_traffic(module, index, size), Collective("broadcast", 8)]}

    def _tied_traffic(self, module: nn.Module, index: int, size: int) -> list[Collective]:
        held = [self.own_parameters(module, each, size) for each in range(size)]
        sends = []
        for parameter in held[index]:
            others = sum(parameter in own for own in held) - 1
            sends += [Collective("send", parameter.nbytes)] * others
        return sends

    def larger(self) -> Case:
        return replace(self, width=64)


@dataclass(frozen=True)
class Text(Stack):
    """A TinyGPT as a chain of layers: embedding, blocks, output. The output layer is tied to the embedding."""

    layers: int = 5
    tied: bool = True

    def __str__(self) -> str:
        return f"a GPT of {self.layers} blocks, {self.schedule}, {self.micro_batches} micro-batches"

    def build_model(self, seed: int) -> nn.Module:
        def build() -> nn.Module:
            gpt = TinyGPT(GPTConfig(VOCABULARY, TOKENS, self.layers, 2, WIDTH), seed)
            if not self.tied:
                gpt.output = nn.Linear(WIDTH, VOCABULARY, bias=False)
            for parameter in gpt.parameters():
                nn.init.normal_(parameter, std=0.3)
            return gpt_layers(gpt)

        return seeded(seed, build, torch.float64)

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (2, self.micro_batches * self.samples, TOKENS)
        tokens, targets = torch.randint(VOCABULARY, shape, generator=generator)
        return tokens, targets

    def loss_of(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), y.flatten())

    def output_bytes(self, module: nn.Module, x: torch.Tensor) -> int:
        return len(x) // self.micro_batches * TOKENS * WIDTH * 8
