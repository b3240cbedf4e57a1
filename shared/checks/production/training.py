"""Train a model sharded by fully_shard on ranks, and judge its layout, memory and values."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from shared import memory
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here
from shared.checks.engine.compare import RELATIVE_TOLERANCE, nearly_equal, total_of
from shared.checks.engine.failures import Wrong
from shared.checks.engine.sharded.dtensors import LocalShard, assembled, judge_tensors, loss_of, shard_of, shards_of
from shared.checks.engine.sharded.training import reference
from shared.checks.engine.sharded.unit_training import UnitPlan, new_optimizer, owners
from shared.checks.engine.training import Draw
from shared.checks.models import awkward, unit_models
from shared.wire import instrumentation
from shared.wire.instrumentation import Call

# -- describe and judge fully_shard's layout: each parameter is split by rows over the ranks that share a copy
#
# Rows are padded to a multiple of the number of ranks when they are sent, but not when they are stored.


@dataclass(frozen=True)
class Unit:
    """Hold a unit's number of elements, without and with padding."""

    numel: int
    padded_numel: int


def units_of(plan: UnitPlan, shard_ranks: int) -> list[Unit]:
    """List the units of a model, the root last."""
    module = unit_models.build(plan.model, 0, plan.dtype)
    owned = owners(module, unit_models.units_of(plan.model, module)).values()
    return [Unit(sum(p.numel() for p in each), sum(padded_numel(p, shard_ranks) for p in each)) for each in owned]


def padded_numel(parameter: torch.Tensor, shard_ranks: int) -> int:
    rows = parameter.shape[0]
    return -(-rows // shard_ranks) * shard_ranks * (parameter.numel() // rows)


def judge_shards(plan: UnitPlan, shards: list[dict], copies: int) -> None:
    """Judge where the rows of each parameter are.

    Args:
        plan: What is trained, and how.
        shards: For each rank, its shards by the parameter's name.
        copies: The number of copies of the model.

    Raises:
        Wrong: Unless each parameter is a DTensor, each rank holds only its rows, and no row is missing.
    """
    shard_ranks = len(shards) // copies
    for name, parameter in unit_models.build(plan.model, 0, plan.dtype).named_parameters():
        held = [own[name] for own in shards]
        most = padded_numel(parameter, shard_ranks) // shard_ranks * parameter.itemsize
        for rank, part in enumerate(held):
            if part.dim is None:
                raise Wrong(
                    {rank: f"{plan}: {name} is not sharded; expected a DTensor"},
                    "Hint: which call shards this parameter?",
                )
            if part.local.dtype != parameter.dtype:
                context = f"{plan}: {name} is stored in {part.local.dtype}; expected {parameter.dtype}"
                raise Wrong({rank: context}, "Hint: in which dtype should a shard be stored?")
            if part.local.nbytes > most:
                context = f"{plan}: {part.local.nbytes:,} bytes of {name} are held; expected at most {most:,}"
                raise Wrong({rank: context}, "Hint: over which ranks is this parameter split?")
        in_all = sum(part.local.nbytes for part in held)
        if in_all != copies * parameter.nbytes:
            evidence = f"{plan}: all ranks together hold {in_all:,} bytes of {name}"
            expected = f"expected {copies * parameter.nbytes:,} for {copies} cop{'y' if copies == 1 else 'ies'}"
            hint = "Hint: over which ranks is this parameter split, and over which is it replicated?"
            if copies > 1:
                hint = f"{hint} Which mesh does each call of fully_shard() get?"
            raise Wrong(f"{evidence}; {expected}", hint)


NAMES = ("replicate", "shard")
_FLOAT32_TOLERANCE = 1e-4  # Each value is rounded by 6e-8 a few dozen times a step, and AdamW divides by small ones.


@dataclass(frozen=True)
class Sharding(UnitPlan):
    """Describe what is trained with fully_shard, and how.

    Attributes:
        mesh: Hosts × ranks per host, or None for no mesh.
        inner_first: Whether nested units are listed before the units that contain them.
    """

    optimizer: str = "AdamW"
    steps: int = 3
    mesh: tuple[int, ...] | None = None
    inner_first: bool = False
    fill: bool = False  # A parameter that no sample uses has no gradient.

    def __str__(self) -> str:
        parts = [super().__str__()]
        if unit_models.KINDS[self.model].units == "nested":
            parts += ["units passed as an iterator" + ", inner ones first" * self.inner_first]
        parts += [f"a mesh of {' × '.join(map(str, self.mesh))}"] if self.mesh else []
        return ", ".join(parts)

    def shown(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return state  # Ranks store parameters in the plan's dtype, whichever dtype they compute in.

    @property
    def copies(self) -> int:
        return self.mesh[0] if self.mesh is not None and len(self.mesh) == 2 else 1

    @property
    def computed(self) -> torch.dtype:
        return self.options.get("compute_dtype") or self.dtype

    @property
    def reduced(self) -> torch.dtype:
        return self.options.get("reduce_dtype") or self.computed


def shard(fully_sharded, module: nn.Module, plan: Sharding) -> Any:
    """Let the student's function shard a module."""
    options = dict(plan.options)
    if unit_models.KINDS[plan.model].units:
        units = unit_models.units_of(plan.model, module)
        options["units"] = iter(units[::-1] if plan.inner_first else units) if units else units
    if plan.mesh is not None:
        options["mesh"] = init_device_mesh(device_here().type, plan.mesh, mesh_dim_names=NAMES[-len(plan.mesh) :])
    sharded = fully_sharded(module, **options)
    if sharded is None:
        raise AssertionError("fully_sharded() returned None; expected the module")
    if not isinstance(sharded, FSDPModule):
        raise AssertionError(f"fully_sharded() returned a {type(sharded).__name__} that fully_shard has not sharded")
    return sharded


@dataclass
class Stepped:
    """What a rank computed in one step."""

    loss: torch.Tensor
    gradients: dict[str, LocalShard | None]
    calls: list[Call]  # in forward and backward
    state: dict[str, LocalShard | None]  # after the step


@dataclass
class OnRank:
    """What one rank computed."""

    building: list[Call]  # the calls in fully_sharded()
    start: dict[str, LocalShard | None]  # the rank's shards before the first step
    steps: list[Stepped]


def probe_sharded(fully_sharded, plan: Sharding, seed: int, x, y) -> OnRank:
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    with instrumentation.listening() as building:
        sharded = shard(fully_sharded, module, plan)
    optimizer = new_optimizer(plan, sharded)
    x, y = x.to(device_here(), plan.dtype), y.to(device_here(), plan.dtype)
    found = OnRank(building, shards_of(sharded), [])
    for _ in range(plan.steps):
        optimizer.zero_grad()
        with instrumentation.listening() as calls:
            loss = loss_of(sharded, x, y)
            loss.backward()
        gradients = {name: shard_of(p.grad) for name, p in sharded.named_parameters(remove_duplicate=False)}
        optimizer.step()
        found.steps.append(Stepped(loss.detach().cpu(), gradients, calls, shards_of(sharded)))
        x = awkward.other_branches(x)
    return found


def train_and_judge(attempt: Attempt, plan: Sharding) -> list[OnRank]:
    """Train on fresh data. Return what probe_sharded found, by rank.

    Raises:
        Wrong: Unless each rank holds its rows, and every step's loss, gradients and parameters equal one process's.
    """
    is_exact = {plan.computed, plan.reduced} == {torch.float64}
    if is_exact:  # In a long training, rounding errors of float32 would add up.
        plan = replace(
            plan, steps=attempt.sizes.steps(plan.steps), learning_rate_factor=attempt.sizes.learning_rate_factor
        )
    draw = Draw(attempt)
    found = attempt.run(probe_sharded, plan, per_rank=draw.per_rank, context=str(plan))
    judge_shards(plan, [result.start for result in found], plan.copies)
    judge_start(plan, found, awkward.state_of(unit_models.build(plan.model, draw.seeds[0], plan.dtype)))
    tolerance = RELATIVE_TOLERANCE if is_exact else _FLOAT32_TOLERANCE
    for number, expected in enumerate(reference(plan, draw, list(range(attempt.world_size))).steps):
        context = f"{plan}, step {number + 1}"
        steps = [result.steps[number] for result in found]
        loss = total_of(step.loss for step in steps) / len(steps)
        if not nearly_equal(loss, expected.loss, tolerance):
            hint = "Hint: are the parameters and buffers that each rank computes with correct?"
            raise Wrong(f"{context}: the mean of the losses is {loss:.6g}, expected {expected.loss:.6g}", hint)
        for of, shards, right in (
            ("the gradient of ", [step.gradients for step in steps], expected.gradients),
            ("", [step.state for step in steps], expected.state),
        ):
            judge_tensors(assembled(shards, plan.copies), right, f"{context}: {of}", tolerance)
    return found


def judge_start(plan: Sharding, found: list[OnRank], source: dict) -> None:
    """Judge that every rank starts with the values of rank 0.

    Raises:
        Wrong: If one does not.
    """
    for rank, start in enumerate(assembled([result.start for result in found], plan.copies)):
        for name, expected in source.items():
            if not torch.equal(start[name], expected):
                hint = "Hint: when are the initial values of parameters and buffers broadcast, and from which rank?"
                raise Wrong({rank: f"{plan}: {name} does not start with rank 0's values"}, hint)


# -- judge the memory of a model sharded by fully_shard: a rank holds its shards, and the unit that computes


SLACK = 1.02  # inputs, step counters
SAMPLES = 2
IN_FLIGHT = 4  # units: one received and one sent, and torch's copy of each
_HINT_ON_UNITS = "Hint: how many units are unsharded at the same time?"


@dataclass
class Peak:
    between: memory.Held  # between steps
    parameters_bytes: int  # the most in the second step
    with_buffers_bytes: int  # the most of parameters and the buffers of their collectives


def probe_memory(fully_sharded, plan: Sharding, seed: int, x, y) -> Peak:
    """Train two steps."""
    module = unit_models.build(plan.model, seed, plan.dtype).to(device_here())
    sharded = shard(fully_sharded, module, plan)
    optimizer = new_optimizer(plan, sharded)
    x, y = x.to(device_here(), plan.dtype), y.to(device_here(), plan.dtype)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(sharded, x, y).backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    between = memory.held(sharded, optimizer)
    with memory.peak(sharded, optimizer) as peak:
        step()
    samples = [(each.held.parameters_bytes, each.held.buckets_bytes) for each in peak.samples]
    return Peak(between, max(samples)[0], max(map(sum, samples)))


def one_unit_is_unsharded_at_a_time(attempt: Attempt) -> None:
    """Allow a rank its shards, the root and two units at the same time.

    Raises:
        Wrong: If it holds more.
    """
    plan, draw = Sharding("Deep", dtype=torch.float32), Draw(attempt, [SAMPLES] * attempt.world_size)
    found = attempt.run(probe_memory, plan, per_rank=draw.per_rank, context=str(plan))
    *units, root = (4 * unit.padded_numel for unit in units_of(plan, attempt.world_size))
    shard_bytes = (sum(units) + root) / attempt.world_size
    most = shard_bytes + root + 2 * max(units)  # One unit computes, and the next one may be unsharded already.
    for rank, result in enumerate(found):
        if result.between.total_bytes > SLACK * 3 * shard_bytes:
            context = f"{result.between.total_bytes:,} bytes are held between steps; expected {3 * shard_bytes:,.0f}"
            raise Wrong({rank: f"{plan}: {context}"}, "Hint: which tensors are kept besides the sharded parameters?")
        if result.parameters_bytes > SLACK * most:
            context = f"{result.parameters_bytes:,} bytes of parameters are held at once; expected at most {most:,.0f}"
            raise Wrong({rank: f"{plan}: {context}"}, _HINT_ON_UNITS)
        if result.with_buffers_bytes > SLACK * (most + IN_FLIGHT * max(units)):
            context = f"{result.with_buffers_bytes:,} bytes of parameters and buffers are held at once"
            expected = f"expected at most {most + IN_FLIGHT * max(units):,.0f}"
            raise Wrong({rank: f"{plan}: {context}; {expected}"}, _HINT_ON_UNITS)
