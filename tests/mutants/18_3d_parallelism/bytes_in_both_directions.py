"""Counts outputs and gradients of a stage, although each goes to another stage.

caught by: step_bytes · small meshes
"""

from solutions import layouts


def step_bytes(shape, sizes, sequences):
    found = layouts.step_bytes(shape, sizes, sequences)
    found["pp"] *= 2
    return found
