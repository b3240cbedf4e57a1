"""Has no rule for sums.

caught by: partial_rules · other operations
"""

from shared.placements import EINSUM, LINEAR, Equation, Partial, Replicate
from solutions.gspmd import Rule


def partial_rules(equation: Equation) -> list[Rule]:
    operands = range(len(equation.inputs))
    if equation.operation == EINSUM:
        every = [tuple(Partial() if each == chosen else Replicate() for each in operands) for chosen in operands]
        return [Rule(inputs, Partial()) for inputs in every]
    if equation.operation in LINEAR and equation.operation != "add":
        return [Rule((Partial(),) * len(operands), Partial())]
    return []
