"""Lets each replica process the whole batch.

caught by: step_bytes · step
"""

from shared import formulas
from solutions import layouts


def step_bytes(shape, sizes, sequences):
    pp, tp = sizes["pp"], sizes["tp"]
    layers = shape.layers / pp
    found = layouts.step_bytes(shape, sizes, sequences)
    found["tp"] = formulas.tensor_parallel_sent_bytes(sequences * shape.context, shape.hidden, layers, tp)
    return found
