"""Our partitioner equals one process for any equation, lengths, placements and mesh, and sends what it says.

The equations are drawn letter by letter. The decisions are tried on meshes of up to three axes, without any ranks.
"""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given
from hypothesis import strategies as st

from shared import ranks, wire
from shared.checks.gspmd.trying import (
    Ways,
    cut,
    every_placement,
    join,
    operation_of,
    result_of,
    rules_of,
    sent_bytes_of,
)
from shared.placements import (
    ADD,
    EINSUM,
    ELEMENTWISE,
    MAX,
    Equation,
    Link,
    Mesh,
    Partial,
    Placements,
    Replicate,
    Shard,
    as_placements,
)
from solutions.gspmd import (
    axis_rules,
    compute,
    execute,
    local_part,
    make_mesh_group,
    operation_for,
    plan_for,
    propagate,
    ranks_along,
    whole_from,
)
from tests.drawn import DEADLINE_S, seeds, tried

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive, pytest.mark.chapter("gspmd")]

FLOAT64 = 8  # bytes


@pytest.fixture(scope="module")
def four_ranks():
    ranks.start(4, detect_mismatch=False)
    yield
    ranks.stop()


# -- drawing


@st.composite
def equations(draw) -> str:
    """Draw an einsum of one to three inputs, or another operation."""
    letters = st.lists(st.sampled_from("abcd"), max_size=3, unique=True).map("".join)
    kind = draw(st.sampled_from([EINSUM] * 3 + [ADD, MAX, *ELEMENTWISE]))
    if kind == EINSUM:
        inputs = draw(st.lists(letters, min_size=1, max_size=3))
        every = sorted(set("".join(inputs)))
        return f"{','.join(inputs)}->{''.join(draw(st.permutations(every)))[: draw(st.integers(0, len(every)))]}"
    inputs = draw(st.lists(letters, min_size=1, max_size=3)) if kind == ADD else [draw(letters)]
    output = "".join(draw(st.permutations(sorted(set("".join(inputs))))))
    if kind == MAX:
        assume(output)
        output = output[: draw(st.integers(0, len(output) - 1))]
    return f"{kind}: {','.join(inputs)}->{output}"


@st.composite
def reshapes(draw) -> str:
    """Draw a reshape that splits dimensions, merges them, or does both."""
    order = "abcdef"[: draw(st.integers(1, 5))]

    def grouped() -> str:
        groups, rest = [], order
        while rest:
            size = draw(st.integers(1, len(rest)))
            groups.append(rest[:size] if size == 1 else f"({rest[:size]})")
            rest = rest[size:]
        return "".join(groups)

    lengths = "".join(f", {each}={draw(st.sampled_from([1, 2, 3, 4, 6]))}" for each in order)
    return f"reshape: {grouped()}->{grouped()}{lengths}"


links = st.builds(Link, st.sampled_from([0.0, 1e-6, 1e-3]), st.sampled_from([0.0, 1e-11, 1e-8]))


@st.composite
def meshes(draw, sizes) -> Mesh:
    chosen = draw(st.sampled_from(sizes))
    return Mesh(chosen, tuple(draw(links) for _ in chosen))


@dataclass(frozen=True)
class Problem:
    """An equation, and inputs with their placements."""

    equation: str
    lengths: dict[str, int]
    placements: tuple[Placements, ...]
    mesh: Mesh
    seed: int

    @property
    def parsed(self) -> Equation:
        return Equation.parse(self.equation)

    def wholes(self) -> list[np.ndarray]:
        draw = np.random.default_rng(self.seed)
        shapes = [[math.prod(map(self.lengths.get, each)) for each in term] for term in self.parsed.inputs]
        return [draw.standard_normal(shape) for shape in shapes]

    def parts(self, wholes: list[np.ndarray]) -> list[list[torch.Tensor]]:
        """Return what each rank holds of each input."""
        draw = np.random.default_rng(self.seed + 1)
        cuts = [cut(whole, each, self.mesh, draw) for whole, each in zip(wholes, self.placements, strict=True)]
        return [[torch.tensor(part) for part in parts] for parts in zip(*cuts, strict=True)]


@st.composite
def problems(draw, sizes, always_states: bool = False, texts=None, unit: int = 1) -> Problem:
    text, mesh = draw(texts if texts is not None else equations()), draw(meshes(sizes))
    equation = Equation.parse(text)
    placements = tuple(
        tuple(draw(st.sampled_from(every_placement(len(term)))) for _ in mesh.sizes) for term in equation.inputs
    )
    lengths = dict(equation.lengths)
    for letter in equation.letters:
        pairs = zip(placements, equation.inputs, strict=True)
        shards = [mesh.shards(each, term.index(letter)) for each, term in pairs if letter in term]
        lengths.setdefault(letter, math.lcm(unit, *shards) * draw(st.integers(1, 3)))
    if always_states or draw(st.booleans()):
        text += "".join(f", {each}={lengths[each]}" for each in equation.letters if each not in equation.lengths)
    return Problem(text, lengths, placements, mesh, draw(seeds))


# -- decisions, without ranks

ANY_MESH = [(1,), (2,), (3,), (4,), (8,), (2, 2), (1, 4), (2, 3), (4, 1), (2, 2, 2)]


@tried(150)
@given(equations())
def test_the_rules_are_those_that_work(text):
    equation = Equation.parse(text)
    assert {(rule.inputs, rule.output) for rule in axis_rules(equation)} == rules_of(text)


def changed(parts: list, step, mesh: Mesh) -> list:
    """Return what all ranks hold after a step."""
    after = list(parts)
    for group in ranks_along(mesh.sizes, step.axis):
        whole = whole_from([parts[rank] for rank in group], step.before)
        for index, rank in enumerate(group):
            after[rank] = local_part(whole, step.after, index, len(group))
    return after


@tried(300)
@given(problems(ANY_MESH) | problems(ANY_MESH, texts=reshapes()))
def test_a_plan_leads_to_the_result_of_one_process(problem):
    wholes = problem.wholes()
    try:
        held = [list(parts) for parts in zip(*problem.parts(wholes), strict=True)]
    except ValueError:
        assume(False)  # NumPy cannot cut these lengths equally
    plan = plan_for(problem.parsed, problem.placements, problem.mesh)
    for step in plan.steps:
        held[step.operand] = changed(held[step.operand], step, problem.mesh)
    results = [compute(problem.parsed, tensors).numpy() for tensors in zip(*held, strict=True)]
    expected = result_of(problem.parsed, wholes)
    np.testing.assert_allclose(join(results, plan.output, problem.mesh), expected, atol=1e-9)


@tried(100)
@given(problems([(2,), (3,), (4,), (2, 2), (2, 3)]))
def test_no_way_is_cheaper(problem):
    plan = plan_for(problem.parsed, problem.placements, problem.mesh)
    best = Ways(problem.parsed, problem.placements, problem.mesh).best()
    assert plan.seconds == pytest.approx(best[0].total_s, abs=1e-13)
    assert (len(plan.collectives), plan.output) in [(way.collectives, way.output) for way in best]


# -- on real ranks


def executed(problem: Problem, parts: list[list[torch.Tensor]]) -> tuple[torch.Tensor, float]:
    """Execute a problem on this rank. Returns the result and the bytes that this rank has sent."""
    mesh_group = make_mesh_group(problem.mesh)
    with wire.ledger() as log:
        result = execute(problem.equation, parts[dist.get_rank()], problem.placements, mesh_group)
    return result.clone(memory_format=torch.contiguous_format), log.sent_bytes


def run(problem: Problem, parts: list[list[torch.Tensor]]) -> list[tuple[torch.Tensor, float]]:
    with ranks.world(problem.mesh.ranks):
        return ranks.run(executed, problem, parts, timeout_s=DEADLINE_S)


@tried(60)
@given(problems([(2,), (4,), (2, 2), (1, 4), (2, 1), (3,)]))
def test_executing_equals_one_process(four_ranks, problem):
    wholes = problem.wholes()
    output, _ = propagate(problem.equation, problem.placements, problem.mesh)
    placements = as_placements(output, len(problem.parsed.output))
    results = [result.numpy() for result, _ in run(problem, problem.parts(wholes))]
    expected = result_of(problem.parsed, wholes)
    np.testing.assert_allclose(join(results, placements, problem.mesh), expected, atol=1e-9)


@tried(40)
@given(problems([(2,), (4,), (2, 2)], always_states=True, unit=16))
def test_each_rank_sends_what_propagate_says(four_ranks, problem):
    assume(all(problem.parsed.inputs))  # in a ring, some ranks send nothing of a single element
    _, collectives = propagate(problem.equation, problem.placements, problem.mesh)
    sizes = problem.mesh.sizes
    sent = [sent_bytes_of(each.operation, each.buffer_bytes, sizes[each.axis]) for each in collectives]
    for _, sent_bytes in run(problem, problem.parts(problem.wholes())):
        assert sent_bytes == pytest.approx(sum(sent) * FLOAT64 / 4)


@tried(40)
@given(problems([(2,), (4,), (2, 2)]), st.data())
def test_lengths_that_do_not_agree_are_rejected(problem, data):
    sharded = [
        (operand, placement.dim)
        for operand, placements in enumerate(problem.placements)
        for placement, size in zip(placements, problem.mesh.sizes, strict=True)
        if hasattr(placement, "dim") and size > 1
    ]
    assume(sharded)
    operand, dim = data.draw(st.sampled_from(sharded))
    letter = problem.parsed.inputs[operand][dim]
    length = problem.lengths[letter] * problem.mesh.ranks + 1
    stated = Equation.parse(problem.equation.split(f", {letter}=")[0].split(", ")[0] + f", {letter}={length}")
    others = {each: problem.lengths[each] for each in problem.parsed.letters if each != letter}
    equation = Equation(stated.operation, stated.inputs, stated.output, others | {letter: length})
    with pytest.raises(ValueError, match="cannot be divided equally"):
        plan_for(equation, problem.placements, problem.mesh)


# -- beside DTensor

DIFFERENCES = [  # the table of lab 17: equation, inputs, our operation and result, DTensor's
    ("ij,jk->ik", (Shard(1), Replicate()), ("all_to_all", Shard(0)), (None, Partial())),
    ("ij,jk->ik", (Partial(), Shard(1)), ("all_reduce", Shard(1)), ("all_gather", Partial())),
    ("relu: ij->ij", (Partial(),), ("reduce_scatter", Shard(0)), ("all_reduce", Replicate())),
    ("add: ij,ij->ij", (Shard(0), Shard(1)), ("all_to_all", Shard(0)), ("all_gather", Shard(0))),
]
IN_TORCH = {"ij,jk->ik": torch.mm, "relu: ij->ij": torch.relu, "add: ij,ij->ij": torch.add}


def run_by_dtensor(equation: str, inputs: tuple) -> tuple[list[str], str]:
    """Run an operation on DTensors. Returns the names of the collectives, and the placement of the result."""
    from torch.distributed import tensor as dtensor
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    placed = []
    for placement in inputs:
        theirs = getattr(dtensor, type(placement).__name__)(*([placement.dim] if hasattr(placement, "dim") else []))
        local = local_part(torch.ones(64, 64), placement, dist.get_rank(), dist.get_world_size())
        placed.append(dtensor.DTensor.from_local(local, mesh, [theirs], run_check=False))
    with wire.ledger() as log:
        result = IN_TORCH[equation](*placed)
        result.to_local().sum()
    (placement,) = result.placements
    return list(log.ops), f"{type(placement).__name__}({getattr(placement, 'dim', '')})"


@pytest.mark.parametrize(("equation", "inputs", "ours", "theirs"), DIFFERENCES)
def test_dtensor_chooses_differently(four_ranks, equation, inputs, ours, theirs):
    stated = ", ".join(f"{letter}=64" for letter in Equation.parse(equation).letters)
    output, collectives = propagate(f"{equation}, {stated}", inputs, 4)
    assert ([each.operation for each in collectives], output) == ([ours[0]], ours[1])
    name, placement = theirs
    expected = [name] if name else [], f"{type(placement).__name__}({getattr(placement, 'dim', '')})"
    assert ranks.run(run_by_dtensor, equation, inputs) == [expected] * 4


# -- what the lab gives


@pytest.mark.parametrize(("before", "after"), [*itertools.product(every_placement(3), repeat=2)])
def test_the_given_operation_fits_the_change(before, after):
    assert operation_for(before, after) == operation_of(before, after)


def test_equal_costs_are_equal_in_whatever_order_they_are_added_up():
    """This plan takes 49 s, so equal sums may differ by more than 1e-15 s."""
    equation, mesh = Equation.parse("bij,bjk->bik"), Mesh((4, 2))
    placements = [(Shard(1), Partial()), (Shard(0), Partial())]
    plan, best = plan_for(equation, placements, mesh), Ways(equation, placements, mesh).best()
    assert (len(plan.collectives), plan.output) in [(way.collectives, way.output) for way in best]
