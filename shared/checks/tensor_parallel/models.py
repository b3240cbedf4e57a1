"""A whole TinyGPT, split by the student's parallelize(). The ranks import this module."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from shared.checks.engine.model_parallel.case import Case, Collective, Shard
from shared.checks.models.small_gpts import SmallGPT
from shared.checks.tensor_parallel.cases import (
    BATCH,
    TOKENS,
    attention_shards,
    loss_traffic,
    own_part,
    own_tokens,
)
from shared.models import TinyGPT


@dataclass(frozen=True)
class Model(Case):
    """A TinyGPT, and what parallelize() must make of it.

    Attributes:
        tied: Whether the output layer shares its weight with the token embedding.
        alike: Whether the two begin with the same values if they are not tied.
        biases: Whether the linear layers have biases.
        by_logits: Whether the loss is computed from whole logits, and not by the model.
        accumulates: Whether the gradients of the samples are accumulated, each from a forward and backward of its own.
    """

    layers: int = 2
    heads: int = 12
    head_width: int = 1
    vocabulary: int = 24
    tied: bool = True
    alike: bool = False
    biases: bool = False
    sequence_parallel: bool = False
    by_logits: bool = False
    accumulates: bool = False
    differentiates_inputs: bool = False

    @property
    def context(self) -> str:
        context = "with a loss of whole logits, " if self.by_logits else ""
        return context + ("with accumulated gradients, " if self.accumulates else "")

    @property
    def has_usual_batches(self) -> bool:
        return self.accumulates  # Each sample has its own forward and backward, so more samples take longer.

    @property
    def width(self) -> int:
        return self.heads * self.head_width

    @property
    def gpt(self) -> SmallGPT:
        return SmallGPT(self.layers, self.heads, self.head_width, self.vocabulary, self.tied, self.alike, self.biases)

    def build_model(self, seed: int) -> TinyGPT:
        return self.gpt.build_model(seed)

    def draw_batch(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = torch.randint(self.vocabulary, (2, BATCH, TOKENS), generator=generator)
        return tokens, targets

    def loss_of(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), y.flatten())

    def split(self, piece, module: nn.Module, group):
        model = piece(module, group, sequence_parallel=self.sequence_parallel)
        model.checked_group = group
        return model

    def train(self, split, x, y, phase):
        if self.by_logits:
            return super().train(split, x, y, phase)
        count = len(x) if self.accumulates else 1
        with phase("forward"):
            losses = [split(*each) / count for each in zip(x.chunk(count), y.chunk(count), strict=True)]
        with phase("backward"):
            for loss in losses:
                loss.backward()
        with torch.no_grad(), phase("forward without targets"):
            return split(x), sum(losses)

    def shards(self, split) -> dict[str, Shard]:
        group, found = split.checked_group, {}
        vocabulary, inner = own_tokens(self.vocabulary, group), own_part(4 * self.width, group)
        for name, parameter in split.named_parameters():
            if name.startswith(("token_embedding", "output")):
                found[name] = Shard(parameter, 0, vocabulary)
            elif ".up." in name:
                found[name] = Shard(parameter, 0, inner)
            elif name.endswith("down.weight"):
                found[name] = Shard(parameter, 1, inner)
            elif ".attention." not in name:
                found[name] = Shard(parameter)
        for index, block in enumerate(split.blocks):
            shards = attention_shards(block.attention, self.heads, self.width, group)
            found |= {f"blocks.{index}.attention.{name}": shard for name, shard in shards.items()}
        return found

    def most_bytes(self, module: nn.Module, index: int, size: int) -> int:
        total = 0
        for name, parameter in module.named_parameters():
            if name.startswith(("token_embedding", "output")):
                total += -(-self.vocabulary // size) * parameter[0].nbytes
            else:
                total += parameter.nbytes if is_replicated(name) else parameter.nbytes // size
        return total

    def traffic(self, module: nn.Module, x: torch.Tensor, index: int, size: int) -> dict[str, list[Collective]]:
        parameters = list(module.parameters())
        itemsize = parameters[0].itemsize
        activations = x.numel() * self.width * itemsize
        loss = loss_traffic(x.numel(), max(itemsize, 4))
        logits = [Collective("all_gather", x.numel() * -(-self.vocabulary // size) * size * itemsize)]
        times = 2 * self.layers + 1
        if self.sequence_parallel:
            each = [Collective("all_gather", activations), Collective("reduce_scatter", activations)] * times
            replicated = sum(p.nbytes for name, p in module.named_parameters() if is_replicated(name))
            backward = [*each, Collective("all_reduce", replicated)]
        else:
            backward = each = [Collective("all_reduce", activations)] * times
        if self.by_logits:
            return {"forward": each + logits, "backward": backward}
        return {"forward": each + loss, "backward": backward, "forward without targets": each + logits}

    def larger(self) -> Case:
        return replace(self, head_width=8, vocabulary=240)


def is_replicated(name: str) -> bool:
    """Tell from a parameter's name whether every rank holds all of it."""
    return "norm" in name or "position" in name or name.endswith(("project.bias", "down.bias"))
