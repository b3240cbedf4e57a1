"""Mutants of this chapter that a row of its table cannot say. Each function is one: see tests/mutants."""

from collections.abc import Sequence
from dataclasses import replace

from shared.placements import Equation, Mesh, Shard
from solutions.gspmd import plan_for


def plan_with_nan_bytes():
    """Plans wrong collectives, whose number of bytes is nan, if it knows the lengths.

    caught by: propagate · cheapest
    """

    WRONG = {"before": Shard(0), "after": Shard(1), "buffer_bytes": float("nan")}

    def propagate(equation: str, placements: Sequence, mesh: Mesh) -> tuple:
        parsed, mesh = Equation.parse(equation), Mesh.of(mesh)
        plan = plan_for(parsed, placements, mesh)
        if parsed.lengths:
            plan = replace(plan, steps=tuple(replace(s, **WRONG) if s.is_collective else s for s in plan.steps))
        return plan.output if len(plan.output) > 1 else plan.output[0], plan.collectives
