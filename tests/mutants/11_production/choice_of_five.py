"""Cheats by looking up the answers to the five known situations, with DDP for all others.

caught by: choose_strategy · what is fast
"""

from shared.planner.clusters import SITUATIONS
from solutions import production as right

ANSWERS = {situation: right.choose_strategy(*situation) for situation in SITUATIONS.values()}


def choose_strategy(shape, cluster, micro_batch=1):
    return ANSWERS.get((shape, cluster)) or right.Choice(0, cluster.gpus, "selective", 0.0)
