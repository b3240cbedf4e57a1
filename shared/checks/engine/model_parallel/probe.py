"""Run a student's split model on a rank, and record everything that it computes, holds and sends."""

import contextlib
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shared.checks.engine.candidate import device_here
from shared.checks.engine.footprint import living_bytes, settled_bytes
from shared.checks.engine.model_parallel.case import Case, Shard
from shared.checks.engine.subgroups import staying_inside
from shared.checks.engine.training import descend
from shared.wire import instrumentation


@dataclass(frozen=True)
class Held:
    """A copy of a shard and its gradient on the CPU, as the rank returns it."""

    shard: Shard
    gradient: torch.Tensor | None


@dataclass
class SplitStep:
    """What a rank recorded of one step."""

    output: Shard | None
    loss: torch.Tensor | None
    input_gradient: torch.Tensor | None
    shards: dict[str, Held]  # with their gradients
    calls: dict[str, list[instrumentation.Call]]  # by phase
    after: dict[str, Held]  # the shards after the step


@dataclass
class SplitTraining:
    """What a rank recorded of a training."""

    start: dict[str, Held]
    steps: list[SplitStep]


def probe_split(
    piece, case: Case, groups: list[list[int]], seed: int, learning_rate: float, batches: list
) -> SplitTraining:
    """Split the whole model and train it.

    Args:
        piece: The student's class or function.
        case: The model, and how to split it.
        groups: The groups of ranks that work together. A single group of all ranks is the world.
        seed: The seed of the whole model.
        learning_rate: The learning rate of SGD.
        batches: This rank's inputs and targets of each step.
    """
    group, members = join_one_of(groups)
    module = case.build_model(seed).to(device_here())
    with staying_inside(members if len(groups) > 1 else None):
        split = case.split(piece, module, group)
        del module
        start = _held(case, split)
        return SplitTraining(start, [_step(case, split, x, y, learning_rate) for x, y in batches])


def _step(case: Case, split, x, y, learning_rate: float) -> SplitStep:
    x = x.to(device_here()).requires_grad_(case.differentiates_inputs)
    calls: dict[str, list[instrumentation.Call]] = defaultdict(list)

    @contextlib.contextmanager
    def phase(name: str):
        with instrumentation.listening() as own_calls:
            yield
        calls[name] += own_calls

    for parameter in _parameters(case, split):
        parameter.grad = None
    output, loss = case.train(split, x, y.to(device_here()), phase)
    if output is not None:
        output = output if isinstance(output, Shard) else Shard(output)
        output = Shard(_copied(output.tensor), output.dim, tuple(output.index))
    if loss is not None:
        loss = _copied(torch.as_tensor(loss))
    input_gradient, shards = _copied_gradient(x), _held(case, split)
    descend(_parameters(case, split), learning_rate)
    return SplitStep(output, loss, input_gradient, shards, dict(calls), _held(case, split))


def _parameters(case: Case, split) -> list[torch.Tensor]:
    """List the parameters that this rank holds, each once."""
    return list({id(each.tensor): each.tensor for each in case.shards(split).values()}.values())


def _held(case: Case, split) -> dict[str, Held]:
    return {
        name: Held(Shard(_copied(each.tensor), each.dim, tuple(each.index)), _copied_gradient(each.tensor))
        for name, each in case.shards(split).items()
    }


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _copied_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    return None if tensor.grad is None else _copied(tensor.grad)


def probe_memory(piece, case: Case, seed: int, most_bytes: int, batches: list) -> dict[str, int]:
    """Split the whole model and train one step, without recording anything.

    Returns:
        The bytes of all tensors that the rank holds and did not hold before, at two moments. The whole model is gone by
        then, unless the student's object keeps it.
    """
    x, y = (each.to(device_here()) for each in batches[0])
    x.requires_grad_(case.differentiates_inputs)
    before_bytes = living_bytes()
    split = case.split(piece, case.build_model(seed).to(device_here()), None)
    found = {"after the split": settled_bytes(most_bytes, before_bytes)}
    case.train(split, x, y, lambda _: contextlib.nullcontext())
    x.grad = None
    descend(_parameters(case, split))
    found["after a step, with its gradients"] = settled_bytes(2 * most_bytes, before_bytes)
    return found


def join_one_of(groups: list[list[int]]) -> tuple[dist.ProcessGroup | None, list[int]]:
    """Form these groups, on every rank of the world.

    Returns:
        This rank's group, None for the world, and its members.
    """
    if len(groups) == 1:
        return None, groups[0]
    formed: list[Any] = [dist.new_group(members) for members in groups]
    return next((group, members) for group, members in zip(formed, groups, strict=True) if dist.get_rank() in members)
