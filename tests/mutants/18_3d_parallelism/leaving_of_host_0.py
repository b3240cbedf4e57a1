"""Looks at the ranks of host 0, whichever host is asked for.

caught by: leaving_bytes · hosts
"""

from solutions.layouts import destinations, step_bytes


def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
    sent_bytes = step_bytes(shape, sizes, sequences)
    own = range(ranks_per_host)

    def crossing(axis):
        return sum(to not in own for rank in own for to in destinations(axis, rank, sizes))

    return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}
