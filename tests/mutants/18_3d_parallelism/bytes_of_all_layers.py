"""Counts the all-reduces of all stages.

caught by: step_bytes · step
"""

from shared import formulas
from solutions import layouts


def step_bytes(shape, sizes, sequences):
    dp, tp = sizes["dp"], sizes["tp"]
    tokens = sequences * shape.context / dp
    found = layouts.step_bytes(shape, sizes, sequences)
    found["tp"] = formulas.tensor_parallel_sent_bytes(tokens, shape.hidden, shape.layers, tp)
    return found
