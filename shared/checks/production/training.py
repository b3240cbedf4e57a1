"""A model sharded by fully_shard and trained on ranks, and what one process gets from all the data."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import RELATIVE_TOLERANCE, close, first_difference
from shared.checks.engine.framework import Attempt, Wrong
from shared.checks.engine.sharded.training import reference
from shared.checks.engine.sharded.unit_training import UnitPlan, new_optimizer
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_models
from shared.checks.production.layout import judge_parts
from shared.wire import instrumentation

NAMES = ("replicate", "shard")
_FLOAT32_TOLERANCE = 1e-4  # each number has rounded at 6e-8 some dozen times a step, and AdamW divides small ones
_ROUNDED_TO_FLOAT32 = 2e-6  # of the largest number: who averages over other ranks is further off


@dataclass(frozen=True)
class Sharding(UnitPlan):
    """mesh: hosts × ranks of a host; None for none. inner_first: in which order nested units are named."""

    optimizer: str = "AdamW"
    steps: int = 3
    mesh: tuple[int, ...] | None = None
    inner_first: bool = False
    fill: bool = False  # what no sample uses has no gradient

    def __str__(self) -> str:
        parts = [super().__str__()]
        if unit_models.KINDS[self.model].units == "nested":
            parts += ["its units in an iterator" + ", inner ones first" * self.inner_first]
        parts += [f"a mesh of {' × '.join(map(str, self.mesh))}"] if self.mesh else []
        return ", ".join(parts)

    def shown(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return state  # ranks keep parameters in the plan's dtype, whatever they compute in

    @property
    def copies(self) -> int:
        return self.mesh[0] if self.mesh is not None and len(self.mesh) == 2 else 1

    @property
    def computed(self) -> torch.dtype:
        return self.options.get("compute_dtype") or self.dtype

    @property
    def reduced(self) -> torch.dtype:
        return self.options.get("reduce_dtype") or self.computed


def shard(fully_sharded, module: nn.Module, plan: Sharding) -> nn.Module:
    """Let the student's function shard a module."""
    options = dict(plan.options)
    if unit_models.KINDS[plan.model].units:
        units = unit_models.units_of(plan.model, module)
        options["units"] = iter(units[::-1] if plan.inner_first else units) if units else units
    if plan.mesh is not None:
        options["mesh"] = init_device_mesh(device_here().type, plan.mesh, mesh_dim_names=NAMES[-len(plan.mesh) :])
    sharded = fully_sharded(module, **options)
    if sharded is None:
        raise AssertionError("fully_sharded() gives back None: where is the module?")
    if not isinstance(sharded, FSDPModule):
        raise AssertionError(f"fully_sharded() gives back a {type(sharded).__name__} that fully_shard has not sharded")
    return sharded


@dataclass(frozen=True)
class Part:
    """What one rank has of a tensor. dim: along which it is split, None where it is no DTensor."""

    local: torch.Tensor
    dim: int | None


def part_of(tensor: torch.Tensor | None) -> Part | None:
    if tensor is None:
        return None
    split = [each.dim for each in getattr(tensor, "placements", ()) if isinstance(each, Shard)]
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return Part(local.detach().cpu().clone(), split[0] if split else None)


def parts_of(module: nn.Module) -> dict[str, Part]:
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return {name: part_of(tensor) for name, tensor in named}


def assembled(parts: list[dict], copies: int = 1) -> list[dict]:
    """Put the parts of ranks together in the kernel, which costs no messages. → tensors by name, by rank"""
    shard_ranks, tensors = len(parts) // copies, []
    for first in range(0, len(parts), shard_ranks):
        group = parts[first : first + shard_ranks]
        for own in group:
            tensors.append({name: _whole(part, [each[name] for each in group]) for name, part in own.items()})
    return tensors


def _whole(own: Part | None, parts: list[Part | None]) -> torch.Tensor | None:
    if own is None or own.dim is None or any(each is None for each in parts):
        return own and own.local
    return torch.cat([each.local for each in parts], own.dim)


def loss_of(module: nn.Module, x, y) -> torch.Tensor:
    """Whatever dtype the module computes in, the loss is in y's."""
    return (module(x).to(y.dtype) - y).square().mean()


def probe_sharded(fully_sharded, plan: Sharding, seed: int, x, y) -> dict:
    """→ this rank's parts to begin with; what each step did and sent"""
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    with instrumentation.listening() as building:
        sharded = shard(fully_sharded, module, plan)
    optimizer = new_optimizer(plan, sharded)
    x, y = x.to(device_here(), plan.dtype), y.to(device_here(), plan.dtype)
    found = {"building": building, "start": parts_of(sharded), "steps": []}
    for _ in range(plan.steps):
        optimizer.zero_grad()
        with instrumentation.listening() as training:
            loss = loss_of(sharded, x, y)
            loss.backward()
        gradients = {name: part_of(p.grad) for name, p in sharded.named_parameters(remove_duplicate=False)}
        optimizer.step()
        done = {"loss": loss.detach().cpu(), "gradients": gradients, "training": training}
        found["steps"].append(done | {"state": parts_of(sharded)})
        x = awkward.other_roads(x)
    return found


def train_and_judge(attempt: Attempt, plan: Sharding) -> list[dict]:
    """Train on fresh data. → by rank, what probe_sharded found

    Raises: Wrong unless each rank has its rows, and every step's loss, gradients and parameters are one process's.
    """
    draw = Draw(attempt)
    found = attempt.run(probe_sharded, plan, per_rank=draw.per_rank, context=str(plan))
    judge_parts(plan, [result["start"] for result in found], plan.copies)
    judge_start(plan, found, awkward.state_of(unit_models.build(plan.model, draw.seeds[0], plan.dtype)))
    tolerance = RELATIVE_TOLERANCE if {plan.computed, plan.reduced} == {torch.float64} else _FLOAT32_TOLERANCE
    for number, want in enumerate(reference(plan, draw, list(range(attempt.world_size))).steps):
        said = f"{plan}, step {number + 1}"
        steps = [result["steps"][number] for result in found]
        loss = sum(step["loss"] for step in steps) / len(steps)
        if not close(loss, want["loss"], tolerance):
            hint = "Look at: which parameters and buffers does each rank compute with?"
            raise Wrong(f"{said}: the mean of the losses is {loss:.6g}, expected {want['loss']:.6g}", hint)
        for what, of in (("gradients", "the gradient of "), ("state", "")):
            judge_tensors(
                assembled([step[what] for step in steps], plan.copies), want[what], f"{said}: {of}", tolerance
            )
    return found


def judge_start(plan: Sharding, found: list[dict], want: dict) -> None:
    """Raises: Wrong unless every rank begins with what rank 0 had."""
    for rank, start in enumerate(assembled([result["start"] for result in found], plan.copies)):
        for name, expected in want.items():
            if not torch.equal(start[name], expected):
                hint = "Look at: who tells whom the values to begin with, of parameters and of buffers, and when?"
                raise Wrong({rank: f"{plan}: {name} does not begin with rank 0's values"}, hint)


def judge_tensors(found: list[dict], want: dict, said: str, tolerance: float) -> None:
    """Raises: Wrong where a rank has another tensor, or one of another dtype."""
    for rank, tensors in enumerate(found):
        for name, expected in want.items():
            was = tensors[name]
            if was is None and expected is None:
                continue
            if was is None or expected is None:
                raise Wrong({rank: f"{said}{name} is {'None' if was is None else 'not None'}; expected the contrary"})
            if was.dtype != expected.dtype:
                hint = "Look at: in which dtype are parts kept, and in which do ranks compute?"
                raise Wrong({rank: f"{said}{name} is {was.dtype}, expected {expected.dtype}"}, hint)
            if not close(was, expected, tolerance):
                hint = "Look at: whose parameters are trained, and between which ranks are gradients averaged?"
                if (was - expected).abs().max() <= _ROUNDED_TO_FLOAT32 * expected.abs().max():
                    hint = "Look at: in which dtype are gradients added up when nobody names one?"
                raise Wrong({rank: f"{said}{name}, {first_difference(was, expected, tolerance)}"}, hint)
