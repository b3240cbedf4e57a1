"""Omits `no_grad`: the result carries an autograd graph that is of no use.

caught by: ring_all_gather · autograd
"""

from solutions import collectives as right
from solutions.collectives import ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401 - unchanged

ring_all_gather = right.ring_all_gather.__wrapped__
