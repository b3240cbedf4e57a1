"""Takes the last of equal plans.

caught by: propagate · equal plans
"""

from collections.abc import Sequence

from shared.placements import Equation, Mesh
from solutions.gspmd import Layouts, Plan, Step  # noqa: F401


def plan_for(equation: Equation, placements: Sequence, mesh: Mesh) -> Plan:
    layouts = Layouts(equation, placements, mesh)
    routes = [layouts.routes(operand) for operand in range(len(equation.inputs))]
    plans = []
    for inputs, output in layouts.rules():
        pairs = zip(routes, inputs, strict=True)
        steps = [step for routes_of, target in pairs for step in routes_of[target]]
        seconds = sum(step.seconds(mesh) for step in steps) + layouts.seconds_to_finish(output)
        plans.append(Plan(tuple(steps), output, seconds))
    return min(reversed(plans), key=lambda plan: plan.cost)


def propagate(equation: str, placements: Sequence, mesh: Mesh) -> tuple:
    plan = plan_for(Equation.parse(equation), placements, Mesh.of(mesh))
    return plan.output if len(plan.output) > 1 else plan.output[0], plan.collectives
