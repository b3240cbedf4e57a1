"""Check exercises 17.4 and 17.5: what the operations cost that change placements, and the cheapest way."""

import math
from collections.abc import Callable, Sequence

from shared.checks.engine.attempts import Attempt
from shared.checks.engine.failures import Wrong
from shared.checks.gspmd.cases import (
    EQUATIONS,
    MATMUL,
    Case,
    describe,
    describe_bytes,
    describe_mesh,
    draw_case,
    draw_links,
    on_one_axis,
)
from shared.checks.gspmd.trying import (
    Way,
    Ways,
    rounds_of,
    seconds_of,
    sent_bytes_of,
)
from shared.placements import Link, Mesh, Partial, Placements, Replicate, Shard, as_placements

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
_EXACT = 1e-9  # relative

# -- 17.4


def probe_costs(rounds_and_bytes, asked: list[tuple]) -> list[tuple]:
    return [tuple(rounds_and_bytes(*each)) for each in asked]


def every_operation_has_its_cost(attempt: Attempt) -> None:
    sizes, number = (1, 2, 3, 4, 8, 64), attempt.random.randint
    asked = [(each, 64 * number(1, 10**6), size) for each in (*COLLECTIVES, "slice", "keep_one") for size in sizes]
    found = attempt.run(probe_costs, asked)[0]
    for (operation, buffer_bytes, size), (rounds, sent_bytes) in zip(asked, found, strict=True):
        tried = f"{operation} of {buffer_bytes:,} bytes on {describe_mesh(Mesh((size,)))}"
        if rounds != (expected := rounds_of(operation, size)):
            hint = "Hint: how many transfers does a rank make, one after the other?"
            raise Wrong(f"{tried}: the number of rounds is {rounds}, expected {expected}", hint)
        if not math.isclose(sent_bytes, expected := sent_bytes_of(operation, buffer_bytes, size), rel_tol=_EXACT):
            hint = "Hint: S is the size of the tensor that all ranks hold together. How much of it does one rank send?"
            found_bytes, expected_bytes = describe_bytes(sent_bytes, expected)
            raise Wrong(f"{tried}: each rank sends {found_bytes} bytes, expected {expected_bytes}", hint)


# -- 17.5

Collective = tuple[str, int, int, float]  # operation, operand, axis, bytes of the buffer
# The plain matrix products: inputs, result, collectives.
_PRODUCTS = (
    ((Shard(0), Replicate()), Shard(0), []),
    ((Replicate(), Shard(1)), Shard(1), []),
    ((Shard(1), Shard(0)), Partial(), []),
    ((Replicate(), Replicate()), Replicate(), []),
    ((Shard(1), Replicate()), Partial(), []),
    ((Replicate(), Shard(0)), Partial(), []),
    ((Shard(0), Shard(0)), Shard(0), [("all_gather", 1)]),
    ((Shard(1), Shard(1)), Shard(1), [("all_gather", 0)]),
)


def probe_propagate(propagate: Callable, asked: list[tuple]) -> list[tuple[object, list[Collective]]]:
    """Propagate placements. Returns the placements of the results, and the collectives as tuples."""
    every = [propagate(*each) for each in asked]
    return [
        (output, [(each.operation, each.operand, each.axis, each.buffer_bytes) for each in collectives])
        for output, collectives in every
    ]


def propagated(attempt: Attempt, cases: Sequence[Case]) -> list[tuple[Placements, list[Collective]]]:
    """Propagate the placements of all cases on one rank, half of the time without tuples where there is one axis.

    Raises:
        Wrong: If the result is not a placement for each axis, or a collective is none.
    """
    bare = [len(case.mesh.sizes) == 1 and attempt.random.random() < 0.5 for case in cases]
    asked = [case.asked(each) for case, each in zip(cases, bare, strict=True)]
    found = attempt.run(probe_propagate, asked, context=str(cases[0]) if len(cases) == 1 else "")[0]
    results = []
    for case, (output, collectives) in zip(cases, found, strict=True):
        placements = as_placements(output, len(case.parsed.output))
        if len(placements) != len(case.mesh.sizes):
            raise Wrong(
                f"{case}: the number of the result's placements is {len(placements)}, expected {len(case.mesh.sizes)}"
            )
        if unknown := [each[0] for each in collectives if each[0] not in COLLECTIVES]:
            message = f"{case}: {unknown[0]!r} is in the list of collectives"
            raise Wrong(message, "Hint: does this step send anything?")
        results.append((placements, collectives))
    return results


def plain_products(attempt: Attempt) -> None:
    for size in (2, 4):
        cases = [Case(MATMUL, on_one_axis(*inputs), Mesh((size,))) for inputs, _, _ in _PRODUCTS]
        found = propagated(attempt, cases)
        for case, (_, output, expected), (output_found, collectives) in zip(cases, _PRODUCTS, found, strict=True):
            called = [(operation, operand) for operation, operand, _, _ in collectives]
            if called != expected:
                wanted = f"expected {describe(output)} after {_listed(expected)}"
                message = f"{case}: the result is {describe(output_found)} after {_listed(called)}; {wanted}"
                raise Wrong(message, _hint_on_product(case, output_found, collectives))
            if output_found != (output,):
                hint = "Hint: which output belongs to the rule that you have chosen?"
                raise Wrong(f"{case}: the result is {describe(output_found)}, expected {describe(output)}", hint)


def _hint_on_product(case: Case, output: Placements, collectives: list[Collective]) -> str:
    ways = Ways(case.parsed, case.placements, case.mesh)
    if math.isclose(_total_s(ways, output, collectives), ways.best()[0].total_s, rel_tol=_EXACT, abs_tol=1e-13):
        return "Both plans take the same time. Hint: which plan is the best among equals?"
    return "Hint: which rule needs the least here, and what would a Partial result cost later?"


def _total_s(ways: Ways, output: Placements, collectives: list[Collective]) -> float:
    """Return the seconds of the collectives, and of the reduction of a Partial result."""
    seconds = sum(seconds_of(operation, size, ways.mesh, axis) for operation, _, axis, size in collectives)
    return seconds + ways.later_s(output)


def the_cheapest_way_along_one_axis(attempt: Attempt) -> None:
    judge_choices(attempt, _drawn(attempt, ((2,), (3,), (4,), (8,), (1,)), 90))


def the_cheapest_way_on_a_mesh(attempt: Attempt) -> None:
    judge_choices(attempt, _drawn(attempt, ((2, 2), (2, 4), (4, 2), (1, 3)), 45))


# Operations for which the rules of i and j give plans of equal cost. The rule of i comes first.
_TIES = (
    ("add: ij,ij->ij", (Shard(0), Shard(1))),
    ("ij,ij->ij", (Shard(1), Shard(0))),
    ("relu: ij->ij", (Partial(),)),
)


def the_first_of_equal_plans(attempt: Attempt) -> None:
    for size in (2, 4):
        cases = [Case(f"{equation}, i=64, j=64", on_one_axis(*inputs), Mesh((size,))) for equation, inputs in _TIES]
        judge_choices(attempt, cases)
        for case, (output, _) in zip(cases, propagated(attempt, cases), strict=True):
            if output != (Shard(0),):
                hint = "Hint: which of the equal plans do you take, and in which order are the rules of shard_rules?"
                message = f"{case}: the result is {describe(output)}, but Shard(0) costs the same and comes first"
                raise Wrong(message, hint)


def _drawn(attempt: Attempt, meshes: Sequence[tuple[int, ...]], count: int) -> list[Case]:
    cases = []
    for index in range(count):
        sizes = attempt.random.choice(meshes)
        mesh = Mesh(sizes, draw_links(attempt, len(sizes)) if index % 2 else ())
        equation = MATMUL if index % 3 == 0 else attempt.random.choice(EQUATIONS)
        cases.append(draw_case(attempt, equation, mesh, states=0.7, most=attempt.random.choice([3, 2000]))[0])
    # A large result that is Partial, and a large weight.
    slow, matrix = Mesh((4,), (Link(1e-6, 1e-9),)), "ij,jk->ik"
    cases.append(Case(f"{matrix}, i=4096, j=8, k=4096", on_one_axis(Shard(1), Shard(0)), slow))
    cases.append(Case(f"{matrix}, i=8, j=4096, k=4096", on_one_axis(Shard(0), Shard(0)), slow))
    cases.append(Case(f"{matrix}, i=4096, j=8, k=8", on_one_axis(Shard(0), Shard(0)), slow))
    # Few bytes over a link of high latency: the number of rounds decides.
    far = Mesh((8,), (Link(1e-3, 1e-12),))
    cases += [Case(f"{matrix}, i=64, j=64, k=64", on_one_axis(Partial(), Shard(1)), far)]
    return cases


def judge_choices(attempt: Attempt, cases: list[Case]) -> None:
    """Compare the time of each plan with that of the best one.

    Raises:
        Wrong: If a plan is slower, or if another one is as fast but has fewer collectives or steps.
    """
    for case, (output, collectives) in zip(cases, propagated(attempt, cases), strict=True):
        ways = Ways(case.parsed, case.placements, case.mesh)
        seconds = sum(seconds_of(operation, size, case.mesh, axis) for operation, _, axis, size in collectives)
        total_s, every = seconds + ways.later_s(output), list(ways.every())
        best, called = ways.best(), [(operation, operand) for operation, operand, _, _ in collectives]
        found = f"{case}: the result is {describe(output)} after {_listed(called)}"
        if not any(way.output == output for way in every):
            raise Wrong(f"{found}; no rule has this result", "Hint: which output belongs to the rule that you chose?")
        if all(way.seconds > seconds * (1 + _EXACT) + 1e-13 for way in every if way.output == output):
            raise Wrong(
                f"{found}; that is not enough for this result", "Hint: does the plan have the steps of all inputs?"
            )
        if not total_s <= best[0].total_s * (1 + _EXACT) + 1e-13:  # This finds nan, too.
            message = f"{found}, which takes {_time(total_s)}; the cheapest way takes {_time(best[0].total_s)}"
            raise Wrong(message, _hint_on_cost(every, seconds, output))
        if (len(collectives), output) not in [(way.collectives, way.output) for way in best]:
            hint = "Hint: what decides between plans that take equally long?"
            raise Wrong(f"{found}; another way takes as long, and has fewer collectives or steps", hint)


def _hint_on_cost(every: list[Way], seconds: float, output: Placements) -> str:
    """Recognize what the student has compared."""
    if math.isclose(seconds, min(way.seconds for way in every), abs_tol=1e-13) and Partial() in output:
        return "The collectives of this plan are the cheapest ones. Hint: what does its Partial result cost later?"
    return "Hint: what do you add up for each plan, and do you take the smallest?"


def _listed(called: Sequence[tuple[str, int]]) -> str:
    """Describe collectives, of which each is an operation and its operand."""
    if not called:
        return "no collective"
    return ", ".join(f"{operation} of input {operand}" for operation, operand in called)


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:,.2f} µs" if seconds < 1e-3 else f"{1e3 * seconds:,.2f} ms"
