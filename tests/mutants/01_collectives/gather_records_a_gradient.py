"""no_grad is forgotten: the result drags a graph along that leads nowhere.

caught by: ring_all_gather · autograd
"""

from solutions import collectives as right
from solutions.collectives import ring_all_reduce, ring_reduce_scatter, tree_broadcast  # noqa: F401 - right as they are

ring_all_gather = right.ring_all_gather.__wrapped__
