"""Split a TinyGPT with torch's own parallelize_module: the counterpart of the course's tensor parallelism."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F  # noqa: N812

from shared.models import Attention, TinyGPT

TOKENS = Shard(1)


class LocalHeads(Attention):
    """The attention of the rank's own heads, whose queries, keys and values come from a column-parallel layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D)
        query, key, value = self.query_key_value(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # (B, H/N, T, D/H)
        return self.project(mixed.transpose(1, 2).flatten(-2))


class OwnPositions(nn.Module):
    """Position embeddings of the rank's own tokens, whose gradient is added up over the ranks."""

    def __init__(self, embedding: nn.Embedding, mesh: DeviceMesh):
        super().__init__()
        self.embedding = parallelize_module(embedding, mesh, SequenceParallel(sequence_dim=0, use_local_output=True))

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        mesh = self.embedding.weight.device_mesh
        return self.embedding(positions.chunk(mesh.size())[mesh.get_local_rank()])


def split_by_dtensor(model: TinyGPT, mesh: DeviceMesh, sequence_parallel: bool = False) -> TinyGPT:
    """Split a TinyGPT in place, over the ranks of a mesh with one dimension. It must be the same on every rank.

    From then on, this process computes the losses of split logits with torch's loss_parallel().
    """
    size, between = mesh.size(), TOKENS if sequence_parallel else Replicate()
    for block in model.blocks:
        _split_block(block, mesh, between)
    if sequence_parallel:
        model.position_embedding = OwnPositions(model.position_embedding, mesh)
        parallelize_module(model.norm, mesh, SequenceParallel())
    tied = model.output.weight is model.token_embedding.weight
    plan = {
        "token_embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh, plan)
    if tied:
        model.output.weight = model.token_embedding.weight
    assert model.config.vocab_size % size == 0, "DTensor's loss_parallel() needs a vocabulary that divides evenly"
    _losses = loss_parallel()
    _losses.__enter__()  # backward needs it as well, so it is never left
    return model


def _split_block(block: nn.Module, mesh: DeviceMesh, between) -> None:
    attention, size = block.attention, mesh.size()
    # A contiguous shard must have queries, keys and values of the same heads: (3, N, …) → (N, 3, …).
    by_rank = attention.query_key_value.weight.detach().unflatten(0, (3, size, -1)).transpose(0, 1).flatten(0, 2)
    attention.query_key_value.weight = nn.Parameter(by_rank.contiguous())
    attention.heads //= size
    attention.__class__ = LocalHeads
    plan = {
        "attention.query_key_value": ColwiseParallel(),
        "attention.project": RowwiseParallel(output_layouts=between),
        "up": ColwiseParallel(input_layouts=between),
        "down": RowwiseParallel(output_layouts=between),
    }
    if between is TOKENS:
        plan["attention"] = PrepareModuleInput(input_layouts=TOKENS, desired_input_layouts=Replicate())
        plan |= {"norm_1": SequenceParallel(use_local_output=True), "norm_2": SequenceParallel(use_local_output=True)}
    parallelize_module(block, mesh, plan)
