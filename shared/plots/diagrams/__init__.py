"""Diagrams of mechanisms: what is where, and what moves where.

    diagrams.collective("all_reduce")    # as the last line of a cell

Unlike the other figures, they show how something works, so their data are made up. They still follow the rules of the
mechanism: what a rank holds after a collective, and the time at which a bucket is launched, are computed.
"""

from shared.plots.diagrams.backward import buckets, exposed_communication, hooks
from shared.plots.diagrams.collectives import collective, tree_broadcast
from shared.plots.diagrams.ranks import data_parallelism, processes

__all__ = ["buckets", "collective", "data_parallelism", "exposed_communication", "hooks", "processes", "tree_broadcast"]
