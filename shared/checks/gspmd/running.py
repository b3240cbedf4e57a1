"""Check exercises 17.6 to 17.8: what the ranks compute and send.

The kernel draws whole tensors and gives each rank only its parts. The ranks' results are joined again, and compared
with what one process computes from the whole tensors.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shared import wire
from shared.checks.engine.attempts import Attempt
from shared.checks.engine.candidate import device_here, mesh_here, value_error_of
from shared.checks.engine.compare import first_difference
from shared.checks.engine.failures import Wrong
from shared.checks.engine.subgroups import called_alone, join_subgroup, members_of, staying_inside
from shared.checks.gspmd.cases import (
    EQUATIONS,
    MATMUL,
    TIMES_AS_LONG,
    Case,
    Tensors,
    beside,
    describe,
    describe_bytes,
    describe_mesh,
    draw_case,
    lengths_for,
    on_one_axis,
    tensors_for,
)
from shared.checks.gspmd.choices import Collective
from shared.checks.gspmd.trying import changes_of, cut, every_placement, join, operation_of, result_of, sent_bytes_of
from shared.placements import (
    EINSUM,
    LINEAR,
    Equation,
    Mesh,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    as_placements,
)
from shared.wire import instrumentation

_FLOAT64 = 8  # bytes
_HINT_IN_PLACE = "Hint: what works in place here?"
_HINT_ON_LIST = "Hint: whose list do you assign to?"
_HINT_ON_BYTES = "Hint: which collective does this change of placement need, and what does your code call?"

# -- 17.6


@dataclass(frozen=True)
class Change:
    """A change of placement of a tensor."""

    before: Placement
    after: Placement
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{describe(self.before)} → {describe(self.after)} of a tensor of shape {list(self.shape)}"


@dataclass
class Returned:
    result: Any  # a tensor, or the name of its type if it is no tensor
    sent_bytes: float
    kept: bool  # whether the arguments are unchanged


def probe_redistribute(
    redistribute: Callable, changes: list[Change], in_subgroup: bool, members: list[int], *own: torch.Tensor
) -> list[Returned]:
    """Change the placement of each tensor."""
    group, is_member = join_subgroup(in_subgroup)
    options, found = {"group": group} if in_subgroup else {}, []
    for change, values in zip(changes, own, strict=True):
        if not is_member:
            continue
        shard = values.to(device_here(), copy=True)
        with staying_inside(members if in_subgroup else None), instrumentation.listening() as calls:
            result = redistribute(shard, change.before, change.after, **options)
        sent_bytes = sum(wire.sent_bytes_of(call, dist.get_rank()) for call in calls)
        found.append(Returned(_copied(result), sent_bytes, torch.equal(shard.cpu(), values)))
    return found


def _copied(result) -> torch.Tensor | str:
    """Return a copy of a result on the CPU, or the name of its type if it is no tensor."""
    if not isinstance(result, torch.Tensor):
        return "None" if result is None else type(result).__name__
    return result.detach().cpu().clone(memory_format=torch.contiguous_format)


def probe_rejected_changes(redistribute: Callable, changes: list[Change]) -> list[str]:
    return [
        value_error_of(
            lambda each=change: redistribute(torch.zeros(each.shape, device=device_here()), each.before, each.after)
        )
        for change in changes
    ]


def plain_changes(attempt: Attempt) -> None:
    placements = (Replicate(), Partial(), Shard(0))
    _judge_changes(attempt, [Change(a, b, (4, 2)) for a in placements for b in placements])
    _judge_changes(attempt, [Change(Shard(0), Shard(1), (4, 2)), Change(Shard(1), Shard(0), (2, 4))])


def changes_of_all_dimensions(attempt: Attempt) -> None:
    size = attempt.world_size
    for dims in (1, 2, 3):
        every = every_placement(dims)
        changes = [Change(a, b, _lengths(attempt, dims, size)) for a in every for b in every]
        _judge_changes(attempt, changes)


def changes_in_groups(attempt: Attempt) -> None:
    every = every_placement(2)
    _judge_changes(attempt, [Change(a, b, (12, 24)) for a in every for b in every], in_subgroup=True)


def changes_that_are_rejected(attempt: Attempt) -> None:
    """Try lengths that the ranks do not divide, and a change for which there is no operation."""
    changes = [
        Change(Replicate(), Shard(1), (2, 7)),
        Change(Partial(), Shard(0), (7, 3)),
        Change(Shard(1), Shard(0), (7, 3)),
    ]
    said = attempt.run(probe_rejected_changes, changes)
    for rank, messages in enumerate(said):
        for change, message in zip(changes, messages, strict=True):
            tried = f"{describe(change.before)} → {describe(change.after)} of a local tensor {list(change.shape)}"
            if not message:
                evidence = f"{tried} is accepted; expected a ValueError"
                raise Wrong({rank: evidence}, "Hint: which function already checks this?")
            if "7" not in message or str(attempt.world_size) not in message:
                evidence = f"{tried}: the ValueError says {message!r}; expected it to name 7 and {attempt.world_size}"
                raise Wrong({rank: evidence}, "Hint: does its message name both numbers?")
    change = Change(Shard(0), Partial(), (4, 2))
    for rank, (message,) in enumerate(attempt.run(probe_rejected_changes, [change])):
        if not message:
            tried = f"{describe(change.before)} → {describe(change.after)}"
            hint = "Hint: what does operation_for return here, and when is a shard right as it is?"
            raise Wrong({rank: f"{tried} is accepted; expected a ValueError"}, hint)


def _lengths(attempt: Attempt, dims: int, size: int) -> tuple[int, ...]:
    return tuple(size * attempt.random.randint(1, 3) for _ in range(dims))


def _judge_changes(attempt: Attempt, changes: list[Change], in_subgroup: bool = False) -> None:
    """Make all changes for which there is an operation, and compare results, bytes and arguments."""
    changes = [each for each in changes if each.before == each.after or operation_of(each.before, each.after)]
    members = members_of(attempt, in_subgroup)
    mesh, draw = Mesh((len(members),)), np.random.default_rng(attempt.draw_seed())
    wholes = [draw.standard_normal(change.shape) for change in changes]
    parts = [cut(whole, (change.before,), mesh, draw) for whole, change in zip(wholes, changes, strict=True)]
    own = [
        tuple(_tensor(each[members.index(rank) if rank in members else 0]) for each in parts)
        for rank in _ranks(attempt)
    ]
    context = called_alone(attempt) if in_subgroup else ""
    found = attempt.run(probe_redistribute, changes, in_subgroup, members, per_rank=own, context=context)
    for index, (change, whole) in enumerate(zip(changes, wholes, strict=True)):
        results = {rank: found[rank][index] for rank in members}
        tried = f"{change} on {describe_mesh(mesh)}"
        _expect_tensors(tried, results, "redistribute", "Hint: what does a collective that works in place return?")
        _judge_values(tried, {rank: each.result for rank, each in results.items()}, whole, (change.after,), mesh)
        expected = _bytes_of_change(change, len(members))
        for rank, result in results.items():
            if not result.kept:
                raise Wrong({rank: f"{tried}: your function has changed its argument"}, _HINT_IN_PLACE)
            if abs(result.sent_bytes - expected) > 1e-6:
                sent_bytes, expected_bytes = describe_bytes(result.sent_bytes, expected)
                message = f"{tried}: this rank sends {sent_bytes} bytes, expected {expected_bytes}"
                raise Wrong({rank: message}, _HINT_ON_BYTES)


def _expect_tensors(tried: str, results: dict[int, Returned], piece: str, hint: str) -> None:
    for rank, each in results.items():
        if not isinstance(each.result, torch.Tensor):
            raise Wrong({rank: f"{tried}: {piece} returned {each.result}, expected a tensor"}, hint)


def _bytes_of_change(change: Change, size: int) -> float:
    operation = operation_of(change.before, change.after) or ""
    return sent_bytes_of(operation, _FLOAT64 * math.prod(change.shape), size)


def _ranks(attempt: Attempt) -> range:
    return range(attempt.world_size)


def _tensor(part: np.ndarray) -> torch.Tensor:
    return torch.tensor(part)


def _judge_values(
    tried: str, results: dict[int, torch.Tensor], expected: np.ndarray, placements: Placements, mesh: Mesh
) -> None:
    """Join the ranks' results, and compare them with the result of one process.

    Raises:
        Wrong: If a result has the wrong shape, replicas differ, or a value is wrong.
    """
    where = f"{tried}: the result should be {describe(placements)}"
    shape = [length // mesh.shards(placements, dim) for dim, length in enumerate(expected.shape)]
    for rank, result in results.items():
        if list(result.shape) != shape:
            raise Wrong(
                {rank: f"{where}, but its shape is {list(result.shape)}, expected {shape}"}, _hint_on(placements)
            )
    try:
        whole = join([result.numpy() for result in results.values()], placements, mesh)
    except ValueError as error:
        raise Wrong(f"{where}, but {error}", _hint_on(placements)) from None
    if not np.allclose(whole, expected, rtol=1e-10, atol=1e-10):
        difference = first_difference(torch.tensor(whole), torch.tensor(expected))
        raise Wrong(f"{where}, but if the ranks' results are joined, {difference}", _hint_on(placements))


def _hint_on(placements: Placements) -> str:
    if any(isinstance(each, Partial) for each in placements):
        return "Hint: the ranks' results add up to the whole. Which rank contributes what?"
    if any(isinstance(each, Shard) for each in placements):
        return "Hint: which dimension is sharded, and in which order do the pieces of the ranks belong together?"
    return "Hint: does every rank have the whole tensor at the end?"


# -- 17.7


@dataclass
class Executed(Returned):
    output: Placements  # as propagate() says
    collectives: list[Collective]


def probe_execute(
    execute: Callable, cases: list[Case], in_subgroup: bool, members: list[int], own: list[list[torch.Tensor]]
) -> list[Executed]:
    """Run each case, on one axis or on the mesh of all ranks."""
    group, is_member = join_subgroup(in_subgroup)
    mesh_groups, found = {}, []
    for case, tensors in zip(cases, own, strict=True):
        if not is_member:
            continue
        bare = len(case.mesh.sizes) == 1
        if not bare and case.mesh.sizes not in mesh_groups:
            mesh_groups[case.mesh.sizes] = beside(execute, "make_mesh_group")(case.mesh)
        output, collectives = beside(execute, "propagate")(*case.asked())
        shards = [tensor.to(device_here(), copy=True) for tensor in tensors]
        placements = case.asked(bare=bare)[1]
        with staying_inside(members if in_subgroup else None), instrumentation.listening() as calls:
            result = execute(case.equation, shards, placements, group if bare else mesh_groups[case.mesh.sizes])
        found.append(
            Executed(
                _copied(result),
                sent_bytes=sum(wire.sent_bytes_of(call, dist.get_rank()) for call in calls),
                kept=all(torch.equal(a.cpu(), b) for a, b in zip(shards, tensors, strict=True)),
                output=as_placements(output, len(case.parsed.output)),
                collectives=[(each.operation, each.operand, each.axis, each.buffer_bytes) for each in collectives],
            )
        )
    return found


def probe_rejected_cases(execute: Callable, cases: list[Case], own: list[list[torch.Tensor]]) -> list[str]:
    every = zip(cases, own, strict=True)
    return [
        value_error_of(lambda c=case, t=tensors: execute(c.equation, t, c.asked(bare=True)[1]))
        for case, tensors in every
    ]


@dataclass
class Multiplied:
    output: Placements
    sent_bytes: float


def probe_dtensor(execute: Callable, cases: list[Case], own: list[list[torch.Tensor]]) -> list[Multiplied]:
    """Multiply each pair of DTensors, and record what DTensor sends and where it puts the result."""
    from torch.distributed import tensor as dtensor

    mesh, found = mesh_here(), []
    for case, tensors in zip(cases, own, strict=True):
        inputs = [
            dtensor.DTensor.from_local(each.to(device_here()), mesh, [_for_dtensor(placement)], run_check=False)
            for each, (placement,) in zip(tensors, case.placements, strict=True)
        ]
        with instrumentation.listening() as calls:
            product = torch.mm(*inputs)
            assert isinstance(product, dtensor.DTensor)
            product.to_local().sum().item()  # waits for the collectives
        placement: Any = product.placements[0]
        output = Shard(placement.dim) if placement.is_shard() else Partial() if placement.is_partial() else Replicate()
        sent_bytes = sum(wire.sent_bytes_of(call, dist.get_rank()) for call in calls)
        found.append(Multiplied((output,), sent_bytes))
    return found


def _for_dtensor(placement: Placement):
    from torch.distributed import tensor as dtensor

    if isinstance(placement, Shard):
        return dtensor.Shard(placement.dim)
    return dtensor.Partial() if isinstance(placement, Partial) else dtensor.Replicate()


def plain_product(attempt: Attempt) -> None:
    every = (Shard(0), Replicate()), (Replicate(), Shard(1)), (Shard(1), Shard(0)), (Shard(0), Shard(1))
    _run_and_judge(attempt, [_product(attempt, *inputs) for inputs in every])


def drawn_operations(attempt: Attempt) -> None:
    mesh = Mesh((attempt.world_size,))
    equations = [*attempt.random.sample(EQUATIONS, 14), MATMUL, MATMUL, MATMUL, "relu: ij->ij", "add: ij,j->ij"]
    _run_and_judge(attempt, [draw_case(attempt, each, mesh) for each in equations])
    # A Partial input of an operation that is not linear, and of one that adds something else.
    both = [("exp: ij->ij", (Partial(),)), ("plus_one: ijk->ijk", (Partial(),)), ("square: ij->ij", (Partial(),))]
    both += [("add: ij,j->ij", (Partial(), Replicate())), ("ij,ij->ij", (Partial(), Partial()))]
    # Operations for which our plan changes two inputs. The operations drawn above often need at most one change.
    both += [("i,j->ij", (Partial(), Partial())), ("ij,jk,kl->il", (Partial(), Partial(), Partial()))]
    _run_and_judge(attempt, [_case(attempt, equation, on_one_axis(*inputs), mesh) for equation, inputs in both])


def bytes_as_propagated(attempt: Attempt) -> None:
    mesh = Mesh((attempt.world_size,))
    equations = [*attempt.random.sample(EQUATIONS, 10), *[MATMUL] * 5]
    drawn = [draw_case(attempt, each, mesh, states=1.0, most=4, unit=mesh.ranks) for each in equations]
    _run_and_judge(attempt, drawn, judges_bytes=True)


def operations_in_groups(attempt: Attempt) -> None:
    mesh = Mesh((len(members_of(attempt, True)),))
    equations = (MATMUL, MATMUL, "exp: ij->ji", "bij,bjk->bik")
    _run_and_judge(attempt, [draw_case(attempt, each, mesh) for each in equations], in_subgroup=True)


def lengths_that_do_not_divide(attempt: Attempt) -> None:
    size = attempt.world_size
    mesh, zeros = Mesh((size,)), lambda *shapes: [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    cases = [
        # If 7 elements were divided among 2 ranks, some would have 4: as many as 8 elements would give every rank.
        (Case(MATMUL, on_one_axis(Shard(1), Replicate()), mesh), zeros((2, 4), (4 * size - 1, 3))),
        (Case(f"{MATMUL}, i=7", on_one_axis(Shard(0), Replicate()), mesh), zeros((4, 2), (2, 3))),
        (Case("ij,ij->ij", on_one_axis(Shard(0), Shard(1)), mesh), zeros((3, 7), (6, 7))),
    ]
    own = [([tensors for _, tensors in cases],)] * size
    said = attempt.run(probe_rejected_cases, [case for case, _ in cases], per_rank=own)
    for rank, messages in enumerate(said):
        for (case, tensors), message in zip(cases, messages, strict=True):
            if not message:
                shapes = " and ".join(str(list(each.shape)) for each in tensors)
                raise Wrong(
                    {rank: f"{case}: local tensors {shapes} were accepted, without a ValueError"},
                    "Hint: what do the given lines above yours check?",
                )


# Products for which DTensor 2.13 makes the same choice, if the matrices are small and square and the equation states no
# lengths. Elsewhere it can choose differently, because it does not count what a Partial result costs later.
_AS_DTENSOR = (
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(1), Replicate()),
    (Replicate(), Shard(0)),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
)


def as_dtensor_does(attempt: Attempt) -> None:
    mesh, lengths = Mesh((attempt.world_size,)), dict.fromkeys("ijk", 2 * attempt.world_size)
    cases = [Case(MATMUL, on_one_axis(*inputs), mesh) for inputs in _AS_DTENSOR]
    tensors = [tensors_for(attempt, case, lengths) for case in cases]
    own = [([each.of_rank(rank) for each in tensors],) for rank in _ranks(attempt)]
    found = attempt.run(probe_execute, cases, False, [*_ranks(attempt)], per_rank=own)
    theirs = attempt.run(probe_dtensor, cases, per_rank=own)
    for rank, (own_results, dtensor_results) in enumerate(zip(found, theirs, strict=True)):
        for case, mine, dtensor in zip(cases, own_results, dtensor_results, strict=True):
            if mine.output != dtensor.output:
                message = f"{case}: the result is {describe(mine.output)}, but DTensor's is {describe(dtensor.output)}"
                raise Wrong({rank: message}, "Hint: does the check of propagate() pass?")
            if mine.sent_bytes != dtensor.sent_bytes:
                own_bytes, dtensor_bytes = describe_bytes(mine.sent_bytes, dtensor.sent_bytes)
                sent = f"this rank sends {own_bytes} bytes; DTensor sends {dtensor_bytes}"
                raise Wrong({rank: f"{case}: {sent}"}, _HINT_ON_EXTRA)


_HINT_ON_EXTRA = "Hint: which steps does the plan have, and what else does your code call?"


def _product(attempt: Attempt, *inputs: Placement) -> tuple[Case, dict]:
    return _case(attempt, MATMUL, on_one_axis(*inputs), Mesh((attempt.world_size,)))


def _case(attempt: Attempt, equation: str, placements: Sequence[Placements], mesh: Mesh) -> tuple[Case, dict]:
    most = attempt.sizes.pick(3, range(3, 3 * TIMES_AS_LONG))
    lengths = lengths_for(Equation.parse(equation), placements, mesh, attempt.random, most)
    return Case(equation, tuple(placements), mesh), lengths


def _run_and_judge(
    attempt: Attempt, drawn: list[tuple[Case, dict]], in_subgroup: bool = False, judges_bytes: bool = False
) -> None:
    """Run cases on the ranks. Compare the results with those of one process, and the bytes with what propagate() says.

    Raises:
        Wrong: If a value is wrong, or a rank sends other bytes than it should.
    """
    cases, members = [case for case, _ in drawn], members_of(attempt, in_subgroup)
    tensors = [tensors_for(attempt, *each) for each in drawn]
    index_of = {rank: members.index(rank) if rank in members else 0 for rank in _ranks(attempt)}
    own = [([each.of_rank(index_of[rank]) for each in tensors],) for rank in _ranks(attempt)]
    context = called_alone(attempt) if in_subgroup else str(cases[0]) if len(cases) == 1 else ""
    found = attempt.run(probe_execute, cases, in_subgroup, members, per_rank=own, context=context)
    for index, (case, tensor) in enumerate(zip(cases, tensors, strict=True)):
        results = {rank: found[rank][index] for rank in members}
        _expect_tensors(str(case), results, "execute", "Hint: which line returns the result?")
        _judge_case(case, tensor, results)
        if judges_bytes:
            _judge_bytes(case, results)


def _judge_case(case: Case, tensors: Tensors, results: dict[int, Executed]) -> None:
    outputs = {describe(result.output) for result in results.values()}
    if len(outputs) > 1:
        raise Wrong(f"{case}: the ranks have different plans, with results {' and '.join(sorted(outputs))}")
    first = next(iter(results.values()))
    partial = [index for index, each in enumerate(case.placements) if Partial() in each]
    try:
        values = {rank: each.result for rank, each in results.items()}
        _judge_values(str(case), values, tensors.expected, first.output, case.mesh)
    except Wrong as wrong:
        if partial and case.parsed.operation not in (EINSUM, *LINEAR):
            wrong.hint = "The input is Partial. Hint: is this operation linear, and when is the sum computed?"
        elif partial and _computes_alone(case, tensors, results):
            wrong.hint = "Each rank only applied the operation to its own term. Hint: which steps does the plan have?"
        raise
    for rank, each in results.items():
        if not each.kept:
            raise Wrong({rank: f"{case}: your code has changed the shards that it got"}, _HINT_ON_LIST)


def _computes_alone(case: Case, tensors: Tensors, results: dict[int, Executed]) -> bool:
    """Return whether every rank has just computed with what it held."""
    parts = [[parts[index] for parts in tensors.parts] for index in range(case.mesh.ranks)]
    try:
        alone = [result_of(case.parsed, each) for each in parts]
    except ValueError:
        return False
    found = [each.result.numpy() for each in results.values()]
    return all(a.shape == b.shape and np.allclose(a, b) for a, b in zip(alone, found, strict=True))


def _judge_bytes(case: Case, results: dict[int, Executed]) -> None:
    """Compare the bytes that each rank sends with those of the collectives that propagate() returns."""
    for rank, each in results.items():
        expected = sum(_bytes_of(collective, case.mesh) for collective in each.collectives)
        if abs(each.sent_bytes - expected) > 1e-6:
            sent_bytes, expected_bytes = describe_bytes(each.sent_bytes, expected)
            message = f"{case}: this rank sends {sent_bytes} bytes; with the collectives of propagate(), "
            raise Wrong({rank: f"{message}it would send {expected_bytes}"}, _HINT_ON_EXTRA)


def _bytes_of(collective: Collective, mesh: Mesh) -> float:
    operation, _, axis, buffer_bytes = collective
    return sent_bytes_of(operation, buffer_bytes, mesh.sizes[axis]) * _FLOAT64 / 4  # propagate() counts float32


# -- 17.8


def probe_axes(ranks_along: Callable, asked: list[tuple]) -> list:
    return [ranks_along(sizes, axis) for sizes, axis in asked]


def ranks_along_every_axis(attempt: Attempt) -> None:
    for sizes in (
        (2, 2),
        (2, 4),
        (4, 1),
        (3,),
        (2, 3, 4),
        (attempt.random.randint(2, 5), attempt.random.randint(2, 5)),
    ):
        grid, axes = np.arange(math.prod(sizes)).reshape(sizes), range(len(sizes))
        found = attempt.run(probe_axes, [(sizes, axis) for axis in axes])[0]
        for axis, groups in zip(axes, found, strict=True):
            expected = np.moveaxis(grid, axis, -1).reshape(-1, sizes[axis]).tolist()
            if [list(group) for group in groups] != expected:
                message = f"ranks_along({sizes}, {axis}) is {groups}"
                hint = "Hint: which coordinate differs between the ranks of one group, and which are the same?"
                raise Wrong(f"{message}; expected {expected}" if len(sizes) < 3 else message, hint)


def probe_may_change(ranks_along: Callable, asked: list[tuple]) -> list[bool]:
    may_change = beside(ranks_along, "may_change")
    return [bool(may_change(*each)) for each in asked]


def one_axis_changes_alone(attempt: Attempt) -> None:
    for dims, axes in ((1, 2), (2, 2), (3, 2), (1, 3)):
        every = [()]
        for _ in range(axes):
            every = [(*each, placement) for each in every for placement in every_placement(dims)]
        asked = [
            (placements, axis, after)
            for placements in every
            for axis, before in enumerate(placements)
            for after in every_placement(dims)
            if operation_of(before, after)
        ]
        found = attempt.run(probe_may_change, asked)[0]
        for (placements, axis, after), answer in zip(asked, found, strict=True):
            expected = (axis, after) in changes_of(dims, (2,) * axes, placements)
            if answer != expected:
                call = f"may_change({describe(placements)}, {axis}, {describe(after)})"
                message = f"{call} is {answer}, expected {expected}"
                if expected:
                    hint = "It could change. Hint: which axes divide this axis's shards again, and which do not?"
                else:
                    hint = "Hint: in which order would the ranks' parts lie in the tensor afterwards?"
                raise Wrong(message, hint)


def plain_product_on_a_mesh(attempt: Attempt) -> None:
    mesh = Mesh((2, 2))
    every = [
        ((Shard(0), Replicate()), (Replicate(), Shard(1))),
        ((Shard(0), Shard(1)), (Replicate(), Shard(0))),
        ((Shard(0), Shard(1)), (Shard(0), Shard(1))),
    ]
    _run_and_judge(attempt, [_case(attempt, MATMUL, inputs, mesh) for inputs in every])


def drawn_operations_on_meshes(attempt: Attempt) -> None:
    size = attempt.world_size
    for sizes in {(2, 2), (1, 4), (4, 1)} if size == 4 else {(size, 1), (1, size)}:
        equations = [*attempt.random.sample(EQUATIONS, 5), *[MATMUL] * 3, "exp: ij->ij"]
        _run_and_judge(attempt, [draw_case(attempt, each, Mesh(sizes)) for each in equations])


def nested_shards(attempt: Attempt) -> None:
    """Let both axes divide the same dimension, in inputs that must change."""
    mesh, twice = Mesh((2, 2)), (Shard(0), Shard(0))
    every = [
        (MATMUL, (twice, twice)),
        (MATMUL, (twice, (Replicate(), Shard(0)))),
        ("exp: ij->ij", ((Shard(0), Partial()),)),
        ("ij,ij->ij", (twice, (Shard(1), Shard(0)))),
        ("add: ij,ij->ij", (twice, (Partial(), Shard(0)))),
        ("ij,ij->ij", ((Shard(0), Replicate()), (Replicate(), Shard(0)))),
        ("max: ij->j", (twice,)),
    ]
    _run_and_judge(attempt, [_case(attempt, equation, inputs, mesh) for equation, inputs in every])


def bytes_on_a_mesh(attempt: Attempt) -> None:
    mesh = Mesh((2, 2))
    equations = [*attempt.random.sample(EQUATIONS, 6), *[MATMUL] * 4]
    drawn = [draw_case(attempt, each, mesh, states=1.0, most=4, unit=mesh.ranks) for each in equations]
    _run_and_judge(attempt, drawn, judges_bytes=True)
