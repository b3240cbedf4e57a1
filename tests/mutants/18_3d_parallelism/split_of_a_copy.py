"""Splits a copy, so that the whole model stays in memory wherever the caller keeps it.

caught by: split_model · memory
"""

import copy

from solutions import parallel_3d as right


def split_model(model, mesh, schedule="1f1b", micro_batches=8):
    return right.split_model(copy.deepcopy(model), mesh, schedule, micro_batches)
