"""Calls `ring_step` from exercise 1.1, which launches both transfers before it waits: there are no turns.

caught by: ring_step_in_turns · turns
"""

from solutions import collectives as right
from solutions.collectives import ring_all_gather, ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401


def ring_step_in_turns(outgoing, incoming, group=None):
    right.ring_step(outgoing, incoming, group)
