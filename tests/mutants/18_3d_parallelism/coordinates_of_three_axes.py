"""Knows no other axes than dp, pp and tp, in this order.

caught by: coordinates · meshes
"""


def coordinates(rank, sizes):
    pp, tp = sizes.get("pp", 1), sizes.get("tp", 1)
    return {"dp": rank // (pp * tp), "pp": rank // tp % pp, "tp": rank % tp}
