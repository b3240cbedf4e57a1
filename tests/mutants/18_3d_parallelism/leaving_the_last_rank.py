"""Looks only at the last rank of the host.

caught by: leaving_bytes · plain hosts
"""

from solutions.layouts import destinations, step_bytes


def leaving_bytes(shape, sizes, sequences, ranks_per_host, host=0):
    sent_bytes = step_bytes(shape, sizes, sequences)
    own = range(host * ranks_per_host, (host + 1) * ranks_per_host)

    def crossing(axis):
        return sum(to not in own for to in destinations(axis, own[-1], sizes))

    return {axis: crossing(axis) * sent_bytes[axis] for axis in sizes}
