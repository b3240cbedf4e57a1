"""Returns a generator of slices, which cannot be indexed and can be used only once.

caught by: flat_and_slices · values
"""

from solutions import bucketed_ddp as right


def flat_and_slices(parameters):
    flat, slices = right.flat_and_slices(parameters)
    return flat, (piece for piece in slices)
