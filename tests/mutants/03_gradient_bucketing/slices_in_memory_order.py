"""Gives a slice its parameter's strides: in channels_last another element comes first.

caught by: flat_and_slices · values
"""

from solutions import bucketed_ddp as right


def flat_and_slices(parameters):
    flat, slices = right.flat_and_slices(parameters)
    return flat, [
        flat.as_strided(p.shape, p.stride(), s.storage_offset()) for p, s in zip(parameters, slices, strict=True)
    ]
