"""A student hands in the step of exercise 1.1, where nobody waits before both are launched.

caught by: ring_step_in_turns · turns
"""

from solutions import collectives as right


def ring_step_in_turns(outgoing, incoming, group=None):
    right.ring_step(outgoing, incoming, group)


def ring_reduce_scatter(tensor, group=None):
    return right.ring_reduce_scatter(tensor, group)


def ring_all_gather(shard, group=None):
    return right.ring_all_gather(shard, group)


def ring_all_reduce(tensor, group=None):
    return right.ring_all_reduce(tensor, group)


def tree_broadcast(tensor, src=0, group=None):
    return right.tree_broadcast(tensor, src, group)
