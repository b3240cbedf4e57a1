"""Runs the backward right after each forward, as without a pipeline.

caught by: gpipe · order
"""

from shared.schedules import Action


def gpipe(stages, micro_batches):
    return [[Action(kind, index) for index in range(micro_batches) for kind in "FB"] for _ in range(stages)]
