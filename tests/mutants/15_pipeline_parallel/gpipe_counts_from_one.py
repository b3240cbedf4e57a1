"""Numbers micro-batches from 1.

caught by: gpipe · order
"""

from shared.schedules import Action


def gpipe(stages, micro_batches):
    every = range(1, micro_batches + 1)
    return [[Action(kind, index) for kind in "FB" for index in every] for _ in range(stages)]
