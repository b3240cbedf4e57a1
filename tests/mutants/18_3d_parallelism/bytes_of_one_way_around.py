"""Takes the all-reduce for a reduce-scatter.

caught by: step_bytes · small meshes
"""

from shared import formulas
from solutions import layouts


def step_bytes(shape, sizes, sequences):
    dp, pp, tp = sizes["dp"], sizes["pp"], sizes["tp"]
    found = layouts.step_bytes(shape, sizes, sequences)
    found["dp"] = formulas.reduce_scatter_sent_bytes(2 * shape.parameters / (pp * tp), dp)
    return found
