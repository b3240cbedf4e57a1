"""Shards along a letter that does not begin its dimension.

caught by: reshape_rules · heads
"""

import math
from collections.abc import Sequence

from shared.placements import Equation, Replicate, Shard
from solutions.gspmd import Rule


def reshape_rules(equation: Equation) -> list[Rule]:
    ((term,), output) = equation.inputs, equation.output
    rules = [Rule((Replicate(),), Replicate())]
    for letter in equation.letters:
        before, after = (next(dim for dim, letters in enumerate(each) if letter in letters) for each in (term, output))
        if before is not None and after is not None:
            rules.append(Rule((Shard(before),), Shard(after)))
    return rules


def local_shape(equation: Equation, shape: Sequence[int]) -> list[int]:
    lengths = dict(equation.lengths)
    for letters, length in zip(equation.inputs[0], shape, strict=True):
        lengths[letters[0]] = length // math.prod(lengths[each] for each in letters[1:])
    return [math.prod(lengths[each] for each in letters) for letters in equation.output]
