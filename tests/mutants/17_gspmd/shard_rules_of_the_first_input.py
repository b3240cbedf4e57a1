"""Shards only the first input that has the letter.

caught by: shard_rules · matrix product
"""

from shared.placements import EINSUM, Equation, Partial, Replicate, Shard, dim_of
from solutions.gspmd import Rule


def shard_rules(equation: Equation) -> list[Rule]:
    rules = [Rule((Replicate(),) * len(equation.inputs), Replicate())]
    for letter in equation.letters:
        dims = [dim_of(letter, term) for term in equation.inputs]
        first = next(each for each, dim in enumerate(dims) if dim is not None)
        inputs = tuple(Shard(dim) if each == first else Replicate() for each, dim in enumerate(dims))
        output_dim = dim_of(letter, equation.output)
        if output_dim is not None:
            rules.append(Rule(inputs, Shard(output_dim)))
        elif equation.operation == EINSUM:
            rules.append(Rule(inputs, Partial()))
    return rules
