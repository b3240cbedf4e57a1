"""Asks the ranks of host 0 what they send to other hosts than the given one.

caught by: leaving_bytes · hosts
"""

from solutions.layouts import destinations, step_bytes


def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
    sent_bytes = step_bytes(shape, sizes, sequences)

    def crossing(axis):
        own = range(ranks_per_host)
        return sum(to // ranks_per_host != host for rank in own for to in destinations(axis, rank, sizes))

    return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}
