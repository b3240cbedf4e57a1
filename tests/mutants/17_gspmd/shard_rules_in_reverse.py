"""Returns the rules in the reverse order of the letters.

caught by: shard_rules · matrix product
"""

from shared.placements import EINSUM, Equation, Partial, Replicate, Shard, dim_of
from solutions.gspmd import Rule


def shard_rules(equation: Equation) -> list[Rule]:
    rules = [Rule((Replicate(),) * len(equation.inputs), Replicate())]
    for letter in reversed(equation.letters):
        dims = [dim_of(letter, term) for term in equation.inputs]
        inputs = tuple(Replicate() if dim is None else Shard(dim) for dim in dims)
        output_dim = dim_of(letter, equation.output)
        if output_dim is not None:
            rules.append(Rule(inputs, Shard(output_dim)))
        elif equation.operation == EINSUM:
            rules.append(Rule(inputs, Partial()))
    return rules
