"""The GPTs that the checks of chapter 18 train on a mesh, what one process computes, and what each rank must hold.

The ranks import this module.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import total_of
from shared.checks.engine.sizes import LARGE_ON
from shared.checks.models.small_gpts import TOKENS, SmallGPT
from shared.models import TinyGPT, gpt_layers

AXES = ("dp", "pp", "tp")
STEPS = 3
PLAIN = SmallGPT()
_ADAM: dict[str, Any] = {
    "lr": 1e-2,
    "eps": 1e-3,
}  # with a larger eps, a gradient near 0 does not become a step of size lr
_SGD = {"lr": 0.5}


@dataclass(frozen=True)
class Plan:
    """A GPT, the mesh that it is trained on, and how.

    Attributes:
        samples: The number of samples in a micro-batch.
        micro_batches: The number of micro-batches of each replica.
        model: The GPT. Its sizes are multiples of 12, except the vocabulary.
        frozen: Parameters with this word in their name are frozen.
        adam: Whether AdamW trains it, and not SGD.
        max_norm: The norm to which gradients are clipped, or None.
        batches: How many global batches add up their gradients before the optimizer steps.
        learning_rate_factor: A factor for the learning rate.
        dtype: The dtype of the parameters.
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero_stage: int = 0
    schedule: str = "1f1b"
    micro_batches: int = 3
    samples: int = 1
    model: SmallGPT = PLAIN
    frozen: str = ""
    adam: bool = False
    max_norm: float | None = None
    batches: int = 1
    steps: int = STEPS
    learning_rate_factor: float = 1.0
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        zero = f", ZeRO-{self.zero_stage}" if self.zero_stage else ""
        frozen = f", frozen {self.frozen}" if self.frozen else ""
        clip = f", max_norm {self.max_norm:g}" if self.max_norm is not None else ""
        return f"dp={self.dp}, pp={self.pp}, tp={self.tp}{zero}{frozen}{clip}, {self.schedule}"

    @classmethod
    def sized(cls, sizes: dict[str, int], **others: Any) -> "Plan":
        """Return a plan for a mesh of these sizes."""
        return replace(cls(**others), **sizes)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def global_batch(self) -> int:
        return self.dp * self.micro_batches * self.samples

    @property
    def optimizer_cls(self) -> type[torch.optim.Optimizer]:
        return torch.optim.AdamW if self.adam else torch.optim.SGD

    @property
    def defaults(self) -> dict[str, Any]:
        settings = _ADAM if self.adam else _SGD
        return settings | {"lr": settings["lr"] * self.learning_rate_factor}

    def build_model(self, seed: int) -> TinyGPT:
        """Build the whole model. Runs in the kernel, too."""
        model = self.model.build_model(seed).to(self.dtype)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (self.frozen and self.frozen in name))
        return model

    def draw_batches(self, attempt: Attempt) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Draw the global batches of all steps. Every other one is twice as large."""
        generator, vocabulary = torch.Generator().manual_seed(attempt.draw_seed()), self.model.vocabulary
        sizes = [self.global_batch * (1 + number % 2) for number in range(self.steps * self.batches)]
        shapes = [(2, size, TOKENS) for size in sizes]
        draws = [torch.randint(vocabulary, shape, generator=generator) for shape in shapes]
        return [(inputs, targets) for inputs, targets in draws]

    def on(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinates."""
        return {"dp": rank // (self.pp * self.tp), "pp": rank // self.tp % self.pp, "tp": rank % self.tp}

    def groups_of(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the ranks of each group that a rank belongs to, by axis. Groups of one rank are left out."""
        strides = {"dp": self.pp * self.tp, "pp": self.tp, "tp": 1}
        found = {}
        for axis, stride in strides.items():
            first, size = rank - self.on(rank)[axis] * stride, self.sizes[axis]
            if size > 1:
                found[axis] = tuple(first + index * stride for index in range(size))
        return found

    def layers_of(self, stage: int) -> range:
        """Return which links of the chain of embedding, blocks and output a stage has."""
        count = self.model.layers + 2
        bounds = [count * part // self.pp for part in range(self.pp + 1)]
        return [range(first, end) for first, end in pairwise(bounds)][stage]

    def names_on(self, rank: int, chain: nn.Sequential) -> dict[str, nn.Parameter]:
        """Return the parameters of a rank's stage, by their names in the whole model."""
        names = {parameter: name for name, parameter in chain.named_parameters()}  # a tied one gets its first name
        own = [p for index in self.layers_of(self.on(rank)["pp"]) for p in chain[index].parameters()]
        return {names[parameter]: parameter for parameter in own}

    @staticmethod
    def is_padded(name: str) -> bool:
        """Tell whether a parameter has a row per token, so that its shards are padded to the same size."""
        return "token_embedding" in name or ".output." in name

    def shape_of(self, name: str, whole: torch.Tensor, rank: int) -> list[int]:
        """Return the shape of a rank's shard, with padding."""
        return list(self.shard_of(name, whole, 0 if self.is_padded(name) else rank).shape)  # rank 0 has the most rows

    def shard_of(self, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's shard of a parameter or its gradient, without padding."""
        index, heads = self.on(rank)["tp"], self.model.heads
        if self.is_padded(name):
            rows = -(-len(whole) // self.tp)
            return whole[index * rows : (index + 1) * rows]
        if ".query_key_value." in name:
            return whole.unflatten(0, (3, heads, -1)).chunk(self.tp, 1)[index].flatten(0, 2)
        if ".up." in name:
            return whole.chunk(self.tp)[index]
        return whole.chunk(self.tp, 1)[index] if name.endswith(("project.weight", "down.weight")) else whole

    def held_bytes(self, rank: int) -> int:
        """Return the bytes of a rank's parameters, with the padding of the vocabulary."""
        parameters = self.names_on(rank, gpt_layers(self.build_model(0)))
        return sum(p.itemsize * math.prod(self.shape_of(name, p, rank)) for name, p in parameters.items())


def mesh_of(plan: Plan) -> DeviceMesh:
    """Make the mesh on which a rank tries a piece, because make_mesh() is another exercise."""
    return init_device_mesh(device_here().type, tuple(plan.sizes.values()), mesh_dim_names=AXES)


def layouts(size: int) -> list[dict[str, int]]:
    """List every mesh of this many ranks."""
    return [
        {"dp": size // (pp * tp), "pp": pp, "tp": tp}
        for pp in range(1, size + 1)
        for tp in range(1, size + 1)
        if size % (pp * tp) == 0
    ]


def drawn(attempt: Attempt, plan: Plan) -> Plan:
    """Draw the sizes of a plan: the model, the batch and the vocabulary, which is odd, so that 2 or 4 ranks pad it."""
    number = attempt.random.randint
    layers, vocabulary = number(max(1, plan.pp - 2), max(2, plan.pp - 1)), 2 * number(6, 14) + 1
    model = replace(plan.model, layers=layers, vocabulary=vocabulary)
    times_as_many = attempt.sizes.pick(1, range(2, 10)) if attempt.world_size == LARGE_ON else 1
    sizes = {"micro_batches": number(1, 3), "samples": times_as_many * number(1, 2)}
    return replace(plan, model=model, **sizes)


# -- one process


@dataclass(frozen=True)
class Step:
    """What one process computes in one step: losses, gradients, their norm, clipped gradients, and parameters."""

    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    norm: torch.Tensor | None
    clipped: dict[str, torch.Tensor | None]
    after: dict[str, torch.Tensor]
    of_replicas: list[dict[str, torch.Tensor]]  # by replica: the gradients of its own samples


def one_process(plan: Plan, seed: int, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[Step]:
    """Train the whole model in this process."""
    model, steps = plan.build_model(seed), []
    chain = gpt_layers(model)
    trained = [parameter for parameter in chain.parameters() if parameter.requires_grad]
    optimizer = plan.optimizer_cls(trained, **plan.defaults)
    for number in range(plan.steps):
        of_step = batches[number * plan.batches : (number + 1) * plan.batches]
        of_replicas = [_gradients(plan, model, chain, of_step, replica) for replica in range(plan.dp)]
        optimizer.zero_grad()
        losses = [model(x, y) for x, y in of_step]
        total_of(losses).backward()
        gradients = copied_gradients(chain)
        norm = None if plan.max_norm is None else nn.utils.clip_grad_norm_(trained, plan.max_norm)
        clipped = copied_gradients(chain)
        optimizer.step()
        after = {name: p.detach().clone() for name, p in chain.named_parameters()}
        steps.append(Step([loss.detach() for loss in losses], gradients, norm, clipped, after, of_replicas))
    return steps


def copied_gradients(chain: nn.Sequential) -> dict[str, torch.Tensor | None]:
    """Copy the gradients of all parameters, by their names."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in chain.named_parameters()}


def _gradients(plan: Plan, model, chain, batches: list, replica: int) -> dict[str, torch.Tensor]:
    model.zero_grad()
    total_of(model(x.chunk(plan.dp)[replica], y.chunk(plan.dp)[replica]) for x, y in batches).backward()
    return {name: p.grad.clone() for name, p in chain.named_parameters() if p.grad is not None}
