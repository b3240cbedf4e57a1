"""Does the work of `Bucket.pack`, too: makes each slice the .grad of its parameter.

caught by: flat_and_slices · values
"""

from solutions import bucketed_ddp as right


def flat_and_slices(parameters):
    flat, slices = right.flat_and_slices(parameters)
    for parameter, piece in zip(parameters, slices, strict=True):
        parameter.grad = piece
    return flat, slices
