"""Counts a rank once, even if both of its neighboring stages are on other hosts.

caught by: leaving_bytes · hosts
"""

from solutions.layouts import destinations, step_bytes


def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
    sent_bytes = step_bytes(shape, sizes, sequences)
    own = range(host * ranks_per_host, (host + 1) * ranks_per_host)

    def crossing(axis):
        return sum(any(to not in own for to in destinations(axis, rank, sizes)) for rank in own)

    return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}
