"""Takes the last letter of a dimension for the sharded one.

caught by: reshape_rules · local shape
"""

import math
from collections.abc import Sequence

from shared.placements import Equation, Replicate, Shard, dim_of
from solutions.gspmd import Rule


def reshape_rules(equation: Equation) -> list[Rule]:
    ((term,), output) = equation.inputs, equation.output
    rules = [Rule((Replicate(),), Replicate())]
    for letter in equation.letters:
        before, after = dim_of(letter, term), dim_of(letter, output)
        if before is not None and after is not None:
            rules.append(Rule((Shard(before),), Shard(after)))
    return rules


def local_shape(equation: Equation, shape: Sequence[int]) -> list[int]:
    lengths = dict(equation.lengths)
    for letters, length in zip(equation.inputs[0], shape, strict=True):
        lengths[letters[-1]] = length // math.prod(lengths[each] for each in letters[:-1])
    return [math.prod(lengths[each] for each in letters) for letters in equation.output]
